# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions at a model that only paints."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.error_handlers import error_event
from vllm_omni.entrypoints.openai.generation.disconnect import while_connected
from vllm_omni.entrypoints.openai.generation.pictures import Painting
from vllm_omni.entrypoints.openai.generation.service import (
    Generation,
    generation_of,
    request_id_of,
)
from vllm_omni.entrypoints.openai.media_checks import PARAM
from vllm_omni.entrypoints.openai.protocol.diffusion_chat import DiffusionChatRequest
from vllm_omni.entrypoints.openai.protocol.images import ImageResponse
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.media.image_encode import CONTENT_TYPES

router = APIRouter()

_NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@router.post(
    "/v1/chat/completions",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: {"content": {"text/event-stream": {}}}, **ERRORS},
)
async def create_chat_completion(body: DiffusionChatRequest, request: Request) -> Response:
    """Answer with pictures, as parts of the message."""
    generation = generation_of(request)
    generation.check_makes("image")
    name = generation.served_name(body.model)
    await asyncio.to_thread(generation.check_fields, body, body.ignored())
    request_id = request_id_of(request, "chatcmpl")
    painting = await while_connected(request, _painting(generation, body, request_id))
    painting.params()
    if body.stream:
        events = _events(painting, name)
        return StreamingResponse(events, media_type="text/event-stream")
    whole = await while_connected(request, painting.whole())
    message = {"role": "assistant", "content": _parts(whole)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "modality": "image"}
    answer = {**_base(painting, name, "chat.completion"), "choices": [choice]}
    metrics = {} if whole.metrics is None else {"metrics": whole.metrics}
    return JSONResponse({**answer, "usage": _NO_TOKENS, **metrics})


async def _painting(
    generation: Generation, body: DiffusionChatRequest, request_id: str
) -> Painting:
    read = generation.references
    pictures = [await read.image(url, PARAM) for url in body.said().image_urls()]
    media = {"image": pictures} if pictures else {}
    return Painting(generation, body.as_generation(), media, request_id, "image_generation")


async def _events(painting: Painting, name: str) -> AsyncGenerator[str, None]:
    """One chunk with the pictures, and one that ends the choice."""
    base = _base(painting, name, "chat.completion.chunk")
    try:
        whole = await painting.whole()
    except Exception as error:  # the client is told, instead of a cut connection
        yield error_event(error, painting.request_id)
        return
    deltas = ({"role": "assistant", "content": _parts(whole)}, None), ({}, "stop")
    for delta, reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "modality": "image"}
        yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def _base(painting: Painting, name: str, kind: str) -> dict[str, Any]:
    return {
        "id": painting.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": name,
    }


def _parts(whole: ImageResponse) -> list[dict[str, Any]]:
    media_type = CONTENT_TYPES[whole.output_format]
    urls = [data.url or f"data:{media_type};base64,{data.b64_json}" for data in whole.data]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]
