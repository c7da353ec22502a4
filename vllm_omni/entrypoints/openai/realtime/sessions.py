# SPDX-License-Identifier: Apache-2.0
"""All WebSocket sessions of a kind that the server holds."""

from collections.abc import Callable
from typing import Protocol

from starlette.websockets import WebSocket

from vllm_omni.entrypoints.openai.realtime.errors import Code, SessionEnd
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits
from vllm_omni.entrypoints.openai.realtime.session import RealtimeSession
from vllm_omni.entrypoints.openai.realtime.socket import TRY_LATER
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.metrics.live import Reading, live_gauges


class Session(Protocol):
    """A session on a WebSocket that has been accepted."""

    async def run(self, model: str | None) -> None:
        """Serve until the client leaves or breaks a limit; `model` is from the URL."""
        ...

    async def refuse(self, end: SessionEnd) -> None:
        """Tell the client why, and close."""
        ...


class Sessions:
    """Admits and runs sessions.

    Args:
        make: Makes one on an accepted WebSocket.
        limits: How many there may be.
        kind: What the gauge of open ones is called after (`KIND_sessions`).
    """

    def __init__(
        self, make: Callable[[WebSocket], Session], limits: RealtimeLimits, kind: str
    ) -> None:
        self._make = make
        self._limits = limits
        self._kind = kind
        self._live = 0
        live_gauges().watch(self)

    def gauges(self) -> Reading:
        """See `Watched`."""
        return {(f"{self._kind}_sessions", ()): self._live}

    async def serve(self, websocket: WebSocket) -> None:
        """Run a session to its end, or turn it away."""
        await websocket.accept(subprotocol=_subprotocol(websocket))
        session = self._make(websocket)
        if self._live >= self._limits.max_sessions:
            await session.refuse(
                SessionEnd(
                    Code.TOO_MANY_SESSIONS,
                    f"The server holds its {self._limits.max_sessions} {self._kind} sessions; "
                    "try again later",
                    TRY_LATER,
                )
            )
            return
        self._live += 1
        try:
            await session.run(websocket.query_params.get("model"))
        finally:
            self._live -= 1


def realtime_sessions(handler: OmniServingChat, limits: RealtimeLimits) -> Sessions:
    """Those of `/v1/realtime`, answered by the chat handler."""
    return Sessions(
        lambda websocket: RealtimeSession(websocket, handler, limits), limits, "realtime"
    )


def _subprotocol(websocket: WebSocket) -> str | None:
    """Browsers offer `realtime` beside their key, and need one answer."""
    return "realtime" if "realtime" in websocket.scope.get("subprotocols", []) else None
