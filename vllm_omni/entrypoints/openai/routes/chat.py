# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

import json
from collections.abc import AsyncGenerator
from http import HTTPStatus

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.api_router import (
    ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL,
)
from vllm.entrypoints.openai.chat_completion.api_router import (
    create_batch_chat_completion as vllm_batch_chat_completion,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.protocol.chat import (
    OmniBatchChatCompletionRequest,
    OmniChatCompletionRequest,
)
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat

router = APIRouter()

_ERROR_EVENT = 'data: {"error"'


def chat_handler(request: Request) -> OmniServingChat:
    """The handler that `app.init_omni_state` made."""
    return request.app.state.omni_serving_chat


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={
        HTTPStatus.OK.value: {"content": {"text/event-stream": {}}},
        **ERRORS,
    },
)
@with_cancellation
@load_aware_call
async def create_chat_completion(
    request: OmniChatCompletionRequest, raw_request: Request
) -> Response:
    """Answer a conversation with text, sound or both."""
    result = await chat_handler(raw_request).create_chat_completion(request, raw_request)
    if isinstance(result, ErrorResponse):
        return JSONResponse(result.model_dump(), result.error.code)
    if isinstance(result, ChatCompletionResponse):
        header_format = raw_request.headers.get(ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
        return JSONResponse(result.model_dump(), headers=metrics_header(header_format))
    return await _streamed(result, raw_request.app.state.args.sse_keep_alive_interval)


@router.post(
    "/v1/chat/completions/batch",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses=ERRORS,
)
async def create_batch_chat_completion(
    request: OmniBatchChatCompletionRequest, raw_request: Request
) -> Response:
    """Answer several conversations with text: vLLM's route, for what it can serve."""
    return await vllm_batch_chat_completion(request, raw_request)


async def _streamed(events: AsyncGenerator[str, None], keep_alive_s: float) -> Response:
    """Stream the events; an error in place of the first one still gets its HTTP status.

    With keep-alive comments the response has to start before there is an event.
    """
    if keep_alive_s > 0:
        return _event_stream(with_sse_keep_alive(events, keep_alive_s))
    first = await anext(events)
    if first.startswith(_ERROR_EVENT):
        await events.aclose()
        error = json.loads(first.removeprefix("data: "))
        return JSONResponse(error, error["error"]["code"])
    return _event_stream(_resumed(first, events))


def _event_stream(events: AsyncGenerator[str, None]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream")


async def _resumed(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    yield first
    async for event in events:
        yield event
