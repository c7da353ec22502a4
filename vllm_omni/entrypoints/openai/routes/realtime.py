# SPDX-License-Identifier: Apache-2.0
"""WS /v1/realtime."""

from fastapi import APIRouter
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.openai.realtime.sessions import Sessions

router = APIRouter()


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """Hold a conversation in OpenAI's realtime protocol; `?model=` is as in `session.update`."""
    sessions: Sessions = websocket.app.state.omni_realtime
    await sessions.serve(websocket)
