# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/speech and /v1/audio/speech/batch, WS /v1/audio/speech/stream."""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from starlette.websockets import WebSocket
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.generation.disconnect import while_connected
from vllm_omni.entrypoints.openai.generation.service import request_id_of
from vllm_omni.entrypoints.openai.protocol.speech import BatchBody, BatchResponse, SpeechBody
from vllm_omni.entrypoints.openai.realtime.sessions import Sessions
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.openai.speech.answers import (
    ClosingResponse,
    primed,
    primed_events,
    whole,
)
from vllm_omni.entrypoints.openai.speech.batch import Batch
from vllm_omni.entrypoints.openai.speech.service import speech_of
from vllm_omni.entrypoints.openai.speech.utterance import Utterance
from vllm_omni.media.audio_encode import CONTENT_TYPES

router = APIRouter()

OK: dict[str, Any] = {
    "content": {
        media_type: {} for media_type in sorted({*CONTENT_TYPES.values(), "text/event-stream"})
    }
}


@router.post(
    "/v1/audio/speech",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: OK, **ERRORS},
)
async def create_speech(body: SpeechBody, request: Request) -> Response:
    """Speak a text; the answer is the file, as it is made."""
    speech = speech_of(request)
    speech.served_name(body.model)
    asked = await while_connected(request, speech.asking().asked(body.input, body))
    utterance = Utterance(speech, asked, request_id_of(request, "speech"))
    metrics = body.return_stage_metrics
    if body.stream_format == "sse":
        events = await while_connected(request, primed_events(utterance, metrics))
        keep_alive_s = request.app.state.args.sse_keep_alive_interval
        return ClosingResponse(with_sse_keep_alive(events, keep_alive_s), "text/event-stream")
    answer = whole(utterance, metrics) if body.stream is False else primed(utterance)
    return await while_connected(request, answer)


@router.post(
    "/v1/audio/speech/batch",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: {"model": BatchResponse}, **ERRORS},
)
async def create_speech_batch(body: BatchBody, request: Request) -> Response:
    """Speak many texts; each has a result of its own."""
    speech = speech_of(request)
    speech.served_name(body.model)
    batch = Batch(speech, body, request_id_of(request, "speech"))
    made = await while_connected(request, batch.answer())
    return JSONResponse(made.model_dump(exclude_none=True))


@router.websocket("/v1/audio/speech/stream")
async def stream_speech(websocket: WebSocket) -> None:
    """Speak a text that comes piece by piece."""
    sessions: Sessions = websocket.app.state.omni_speech_sessions
    await sessions.serve(websocket)
