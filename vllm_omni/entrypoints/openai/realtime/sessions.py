# SPDX-License-Identifier: Apache-2.0
"""All realtime sessions of the server."""

from starlette.websockets import WebSocket

from vllm_omni.entrypoints.openai.realtime.errors import Code, SessionEnd
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits
from vllm_omni.entrypoints.openai.realtime.session import TRY_LATER, RealtimeSession
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.metrics.live import Reading, live_gauges


class RealtimeSessions:
    """Admits and runs sessions.

    Args:
        handler: The chat handler that answers.
        limits: For each session, and how many there may be.
    """

    def __init__(self, handler: OmniServingChat, limits: RealtimeLimits) -> None:
        self._handler = handler
        self._limits = limits
        self._live = 0
        live_gauges().watch(self)

    def gauges(self) -> Reading:
        """See `Watched`."""
        return {("realtime_sessions", ()): self._live}

    async def serve(self, websocket: WebSocket) -> None:
        """Run a session to its end, or turn it away."""
        await websocket.accept(subprotocol=_subprotocol(websocket))
        session = RealtimeSession(websocket, self._handler, self._limits)
        if self._live >= self._limits.max_sessions:
            await session.refuse(
                SessionEnd(
                    Code.TOO_MANY_SESSIONS,
                    f"The server holds its {self._limits.max_sessions} realtime sessions; "
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


def _subprotocol(websocket: WebSocket) -> str | None:
    """Browsers offer `realtime` beside their key, and need one answer."""
    return "realtime" if "realtime" in websocket.scope.get("subprotocols", []) else None
