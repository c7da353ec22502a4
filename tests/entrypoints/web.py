# SPDX-License-Identifier: Apache-2.0
"""A web of its own for tests: servers on loopback addresses, and names that lead to them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Names(AbstractResolver):
    """Resolves each name to the addresses it was given, one per question, the last for ever."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.left = {name: list(each) for name, each in addresses.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        left = self.left.get(host.partition(".")[0])
        if left is None:
            raise OSError("unknown name")
        address = left.pop(0) if len(left) > 1 else left[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
        ]

    async def close(self) -> None:
        pass


class Site:
    """A server that notes what it is asked for and what it has sent."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self._answers = answers
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.port = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split(" ")[1]
            lines = (line.partition(": ") for line in head[1:] if line)
            headers = {name.lower(): value for name, _, value in lines}
            self.requests.append((path, headers))
            await self._answers[path.partition("?")[0]](path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client had enough
        finally:
            writer.close()


@asynccontextmanager
async def site(host: str = "127.0.0.1", ssl: Any = None, **answers: Answer) -> AsyncIterator[Site]:
    """A site whose path `/name` is answered by `name`; to a proxy, a name is a whole URL."""
    it = Site({name if ":" in name else f"/{name}": each for name, each in answers.items()})
    server = await asyncio.start_server(it._serve, host, 0, ssl=ssl)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()


def answer(body: bytes = b"", status: int = 200, **headers: str) -> Answer:
    """A whole answer; `content_encoding` is the header `content-encoding`."""
    fields = {"content-length": str(len(body)), **_dashed(headers)}

    async def write(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(status, fields) + body)

    return write


def moved(to: str) -> Answer:
    return answer(b"moved", 302, location=to)


def in_turn(*answers: Answer) -> Answer:
    """The first one first, and the last one for ever."""
    left = list(answers)

    async def write(path: str, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(path, writer)

    return write


def endless(block: bytes, pause_s: float, sent: list[int]) -> Answer:
    """Blocks without a declared length, until the client leaves."""

    async def write(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(200, {}))
        while True:
            writer.write(block)
            await writer.drain()
            sent.append(len(block))
            await asyncio.sleep(pause_s)

    return write


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
