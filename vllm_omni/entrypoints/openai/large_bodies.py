# SPDX-License-Identifier: Apache-2.0
"""Large media in a JSON body go around the JSON parser.

A parser holds Python's lock from the first byte to the last, so 64 MiB of base64 stop the whole
server for some 100 ms in whatever thread they are parsed, and each copy of the string does it
again. So the payload of a large data URL is cut out of the body beforehand, in small steps, and a
name is left in its place; `media.py` decodes it from where it lies, without the lock.
"""

import asyncio
import heapq
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import islice

import regex as re
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE_BODY = 1 << 20
"""Bytes of a body from which on it is worth a look."""
LARGE_PAYLOAD = 256 << 10
"""Bytes of a payload from which on it is cut out."""
STEP = 4 << 20
"""Bytes that are searched while the lock is held."""
CONTEXT = 300
"""Bytes around a payload that tell what it is."""

MAX_PLACES = 1000
"""Places that are looked at; what comes after them is parsed as it is."""

_DATA_URL = b";base64,"
# What ends in a data URL, and is the URL of a part of a message: ... "image_url": {"url": "data:
_BEFORE_URL = re.compile(
    rb'"(?:image|audio|video)_url"\s*:\s*(?:\{[^{}]*?"url"\s*:\s*)?"data:(?!(?i:video/jpeg))[^",]*$'
)
_SOUND = b'"input_audio"'
_BEFORE_SOUND = re.compile(rb'"input_audio"\s*:\s*\{[^{}]*?"data"\s*:\s*"')

Payloads = dict[str, memoryview]

_payloads: ContextVar[Payloads | None] = ContextVar("payloads", default=None)


def payload_of(url: str) -> memoryview | None:
    """The payload that a data URL of the current request had before it was cut out."""
    payloads = _payloads.get()
    return payloads.get(url[-_NAME_LENGTH:]) if payloads else None


def cut_out(body: bytearray) -> tuple[bytes, Payloads]:
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


def _payload_spans(body: bytearray) -> Iterator[tuple[int, int]]:
    """Where large payloads begin and end, in order."""
    for start in heapq.merge(_data_urls(body), _sounds(body)):
        end = _find(body, b'"', start, len(body))
        # With an escape in it, it is not simply the string's content.
        if end - start >= LARGE_PAYLOAD and _find(body, b"\\", start, end) < 0:
            yield start, end


def _data_urls(body: bytearray) -> Iterator[int]:
    """Where the payloads of data URLs begin."""
    for found in islice(_all(body, _DATA_URL), MAX_PLACES):
        if _BEFORE_URL.search(body, max(0, found - CONTEXT), found):
            yield found + len(_DATA_URL)


def _sounds(body: bytearray) -> Iterator[int]:
    """Where the data of parts with sound begin."""
    for found in islice(_all(body, _SOUND), MAX_PLACES):
        if match := _BEFORE_SOUND.match(body, found, found + CONTEXT):
            yield int(match.end())


def _all(body: bytearray, wanted: bytes) -> Iterator[int]:
    position = 0
    while (found := _find(body, wanted, position, len(body))) >= 0:
        yield found
        position = found + len(wanted)


def _find(body: bytearray, wanted: bytes, start: int, end: int) -> int:
    """`bytearray.find`, in steps between which other threads may run."""
    for step in range(start, end, STEP):
        found = body.find(wanted, step, min(end, step + STEP + len(wanted) - 1))
        if found >= 0:
            return found
    return -1


class LargeBodyMiddleware:
    """Cuts large payloads out of JSON bodies.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "json" not in Headers(scope=scope).get("content-type", ""):
            await self.app(scope, receive, send)
            return
        payloads: Payloads = {}
        _payloads.set(payloads)

        async def sent(message: Message) -> None:
            payloads.clear()  # an answer begins when all media have been read
            await send(message)

        await self.app(scope, _Body(receive, payloads).receive, sent)


class _Body:
    """The body of one request, which comes in one piece if it is large."""

    def __init__(self, receive: Receive, payloads: Payloads) -> None:
        self._receive = receive
        self._payloads = payloads
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
        body = bytearray(message["body"])
        while message.get("more_body", False):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
        if len(body) < LARGE_BODY:
            return {"type": "http.request", "body": bytes(body), "more_body": False}
        rest, payloads = await asyncio.to_thread(cut_out, body)
        self._payloads.update(payloads)
        return {"type": "http.request", "body": rest, "more_body": False}
