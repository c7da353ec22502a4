# SPDX-License-Identifier: Apache-2.0
"""Large media in a JSON body go around the JSON parser.

A parser holds Python's lock from the first byte to the last, so 64 MiB of base64 stop the whole
server for some 100 ms in whatever thread they are parsed, and each copy of the string does it
again. So the payload of a large data URL is cut out of the body beforehand, in small steps, and a
name is left in its place; `media.py` decodes it from where it lies, without the lock.

The body is collected in memory of its own, in large pages: a `bytearray` of that size is copied
while it grows, and to free it takes as long as 5 ms, each time with the lock held. A thread copies
it there without the lock: to clear a large page takes a virtual machine 4 ms when its host has to
find the memory first, and bodies that come together need the next one together.
"""

import asyncio
import heapq
import mmap
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import islice

import numpy as np
import regex as re
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE_BODY = 1 << 20
"""Bytes of a body from which on it is worth a look."""
LARGE_PAYLOAD = 256 << 10
"""Bytes of a payload from which on it is cut out."""
STEP = 1 << 20
"""Bytes that are searched while the lock is held."""
PART = 1 << 20
"""Bytes of a body that wait until they are copied."""
CONTEXT = 300
"""Bytes around a payload that tell what it is."""

MAX_PLACES = 1000
"""Places that are looked at; what comes after them is parsed as it is."""

_DATA_URL = b";base64,"
# What ends in a data URL, and is the URL of a part of a message: ... "image_url": {"url": "data:
# or a recording of a speech request: "ref_audio": "data:
_BEFORE_URL = re.compile(
    rb'(?:"(?:image|audio|video)_url"\s*:\s*(?:\{[^{}]*?"url"\s*:\s*)?'
    rb'|"ref_audio(?:_2)?"\s*:\s*\[?\s*)"data:(?!(?i:video/jpeg))[^",]*$'
)
_SOUND = b'"input_audio"'
_BEFORE_SOUND = re.compile(rb'"input_audio"\s*:\s*\{[^{}]*?"data"\s*:\s*"')

Payloads = dict[str, memoryview]
Body = bytearray | mmap.mmap

_payloads: ContextVar[Payloads | None] = ContextVar("payloads", default=None)


def payload_of(url: str) -> memoryview | None:
    """The payload that a data URL of the current request had before it was cut out."""
    payloads = _payloads.get()
    return payloads.get(url[-_NAME_LENGTH:]) if payloads else None


def cut_out(body: Body) -> tuple[bytes, Payloads]:
    """A JSON body without its large payloads, and these by the names left in their places."""
    view = memoryview(body)
    rest: list[memoryview | bytes] = []
    payloads: Payloads = {}
    copied = 0
    for start, end in _payload_spans(body):
        name = _new_name()
        payloads[name] = view[start:end]
        rest += [view[copied:start], name.encode()]
        copied = end
    return b"".join([*rest, view[copied:]]), payloads


def _new_name() -> str:
    """Nobody can guess it, and it looks like base64."""
    return "omni" + uuid.uuid4().hex


_NAME_LENGTH = len(_new_name())


def _payload_spans(body: Body) -> Iterator[tuple[int, int]]:
    """Where large payloads begin and end, in order."""
    for start in heapq.merge(_data_urls(body), _sounds(body)):
        end = _find(body, b'"', start, len(body))
        # With an escape in it, it is not simply the string's content.
        if end - start >= LARGE_PAYLOAD and _find(body, b"\\", start, end) < 0:
            yield start, end


def _data_urls(body: Body) -> Iterator[int]:
    """Where the payloads of data URLs begin."""
    for found in islice(_all(body, _DATA_URL), MAX_PLACES):
        if _BEFORE_URL.search(body, max(0, found - CONTEXT), found):
            yield found + len(_DATA_URL)


def _sounds(body: Body) -> Iterator[int]:
    """Where the data of parts with sound begin."""
    for found in islice(_all(body, _SOUND), MAX_PLACES):
        if match := _BEFORE_SOUND.match(body, found, found + CONTEXT):
            yield int(match.end())


def _all(body: Body, wanted: bytes) -> Iterator[int]:
    position = 0
    while (found := _find(body, wanted, position, len(body))) >= 0:
        yield found
        position = found + len(wanted)


def _find(body: Body, wanted: bytes, start: int, end: int) -> int:
    """The body's `find`, in steps between which other threads do run."""
    for step in range(start, end, STEP):
        found = body.find(wanted, step, min(end, step + STEP + len(wanted) - 1))
        if found >= 0:
            return found
        time.sleep(0)
    return -1


class LargeBodyMiddleware:
    """Cuts large payloads out of JSON bodies, one body at a time: it is work for one thread anyhow.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._cutter = ThreadPoolExecutor(1, "large-bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else None
        if headers is None or "json" not in headers.get("content-type", ""):
            await self.app(scope, receive, send)
            return
        payloads: Payloads = {}
        _payloads.set(payloads)

        async def sent(message: Message) -> None:
            payloads.clear()  # an answer begins when all media have been read
            await send(message)

        await self.app(scope, _Body(receive, payloads, self._cutter).receive, sent)


class _Body:
    """The body of one request, which comes in one piece if it is large."""

    def __init__(self, receive: Receive, payloads: Payloads, cutter: ThreadPoolExecutor) -> None:
        self._receive = receive
        self._payloads = payloads
        self._cutter = cutter
        self._ended = False

    async def receive(self) -> Message:
        """ASGI's."""
        message = await self._receive()
        if self._ended or message["type"] != "http.request":
            return message
        if message.get("more_body", False):
            message = await self._whole(message)
        self._ended = True
        return message

    async def _whole(self, message: Message) -> Message:
        first = bytearray(message["body"])
        while message.get("more_body", False) and len(first) < LARGE_BODY:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            first += message.get("body", b"")
        if len(first) < LARGE_BODY:
            return {"type": "http.request", "body": bytes(first), "more_body": False}
        loop = asyncio.get_running_loop()
        collected = Collected()
        part: list[bytes | bytearray] = [first]
        while message.get("more_body", False):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            part.append(message.get("body", b""))
            if sum(map(len, part)) >= PART:
                await loop.run_in_executor(self._cutter, collected.append, part)
                part = []
        await loop.run_in_executor(self._cutter, collected.append, part)
        rest, payloads = await loop.run_in_executor(self._cutter, cut_out, collected.whole())
        self._payloads.update(payloads)
        return {"type": "http.request", "body": rest, "more_body": False}


class Collected:
    """Bytes that come in pieces."""

    def __init__(self) -> None:
        self._memory = _memory(2 * LARGE_BODY)
        self._size = 0

    def append(self, pieces: Iterable[bytes | bytearray]) -> None:
        """Copy pieces to the end, without Python's lock for the most part."""
        for piece in filter(None, pieces):
            end = self._size + len(piece)
            if end > len(self._memory):
                self._memory.resize(2 * end)  # moves pages, not bytes; untouched ones cost nothing
            _copy(piece, self._memory, self._size)
            self._size = end

    def whole(self) -> mmap.mmap:
        """All of it."""
        self._memory.resize(self._size)
        return self._memory


def _copy(piece: bytes | bytearray, memory: mmap.mmap, start: int) -> None:
    """As a slice would do it, but numpy lets go of the lock."""
    np.frombuffer(memory, np.uint8, len(piece), start)[:] = np.frombuffer(piece, np.uint8)


def _memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
