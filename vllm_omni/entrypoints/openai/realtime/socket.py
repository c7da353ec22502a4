# SPDX-License-Identifier: Apache-2.0
"""A client's WebSocket within limits: its events come in, ours go out, both in bounded amounts."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.realtime.errors import (
    Code,
    EventError,
    SessionEnd,
    invalid_event,
)
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits, TokenBucket

logger = init_logger(__name__)

NORMAL, GOING_AWAY, POLICY, TOO_BIG, INTERNAL, TRY_LATER = 1000, 1001, 1008, 1009, 1011, 1013
"""Close codes of RFC 6455 (1013: of its registry)."""
E = TypeVar("E", bound=BaseModel)


class EventSocket:
    """A WebSocket.

    Args:
        websocket: Accepted.
        limits: What the client may do.
        name: Of the session, for the log.
    """

    def __init__(self, websocket: WebSocket, limits: RealtimeLimits, name: str) -> None:
        self._websocket = websocket
        self._limits = limits
        self._name = name
        self._bucket = TokenBucket(limits.events_per_second)
        self._sending = asyncio.Lock()

    async def receive(self) -> dict[str, Any]:
        """ASGI's next message."""
        return dict(await self._websocket.receive())

    def decoded(self, message: dict[str, Any]) -> Any:
        """What the JSON of a message says.

        Raises:
            WebSocketDisconnect: The client has left.
            SessionEnd: It broke a limit.
            EventError: It is no JSON.
        """
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", GOING_AWAY))
        if not self._bucket.take():
            raise SessionEnd(
                Code.RATE_LIMIT,
                f"More than {self._limits.events_per_second:g} events per second "
                "(--realtime-max-events-per-second)",
                POLICY,
            )
        frame = message.get("text") or message.get("bytes") or ""
        if len(frame) > self._limits.max_frame_bytes:
            raise SessionEnd(
                Code.FRAME_TOO_LARGE,
                f"A message of {len(frame)} bytes; the limit is {self._limits.max_frame_bytes} "
                "(--realtime-max-frame-bytes)",
                TOO_BIG,
            )
        try:
            return msgspec.json.decode(frame)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise EventError(Code.INVALID_JSON, "Invalid JSON") from None

    def idle(self) -> SessionEnd:
        """What to raise for a client that has sent nothing for too long."""
        return SessionEnd(
            Code.IDLE, f"Nothing was sent for {self._limits.idle_timeout_s:g} s", GOING_AWAY
        )

    async def send(self, frame: str | bytes) -> None:
        """Send an event, or bytes.

        Raises:
            WebSocketDisconnect: The client has left, or does not read.
        """
        async with self._sending:
            try:
                async with asyncio.timeout(self._limits.send_timeout_s):
                    if isinstance(frame, str):
                        await self._websocket.send_text(frame)
                    else:
                        await self._websocket.send_bytes(frame)
            except TimeoutError:
                logger.info("Session %s: its client does not read", self._name)
                raise WebSocketDisconnect(GOING_AWAY) from None

    async def close(self, code: int, reason: str) -> None:
        """End it."""
        await self._websocket.close(code, reason)


def event_of(raw: Any, kinds: Mapping[str, type[E]]) -> E:
    """A client's event.

    Args:
        raw: What the JSON says.
        kinds: The events there are, by `type`.

    Raises:
        EventError: It is none of them.
    """
    if not isinstance(raw, dict):
        raise EventError(Code.INVALID_EVENT, "An event is a JSON object", "type")
    name = raw.get("type")
    if name is None:
        raise EventError(Code.INVALID_EVENT, "Missing required field: type", "type")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise EventError(Code.UNKNOWN_EVENT, f"Unknown event type: {str(name)[:80]}", "type")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise invalid_event(error) from None
