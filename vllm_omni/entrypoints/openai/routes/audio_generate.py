# SPDX-License-Identifier: Apache-2.0
"""POST /v1/audio/generate."""

import asyncio
from http import HTTPStatus

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.generation.disconnect import while_connected
from vllm_omni.entrypoints.openai.generation.service import generation_of, request_id_of
from vllm_omni.entrypoints.openai.generation.sounds import Composing
from vllm_omni.entrypoints.openai.protocol.audio_generate import AudioGenerateRequest
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.openai.stage_metrics import stages_header
from vllm_omni.media.audio_encode import CONTENT_TYPES

router = APIRouter()


@router.post(
    "/v1/audio/generate",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: {"content": {"audio/wav": {}}}, **ERRORS},
)
async def generate_audio(body: AudioGenerateRequest, request: Request) -> Response:
    """Make a sound or a piece of music from a text; the answer is the file."""
    generation = generation_of(request)
    generation.check_makes("audio")
    headers = generation.model_header(body.model)
    await asyncio.to_thread(generation.check_fields, body)
    composing = Composing(generation, body, request_id_of(request, "audio"))
    data, stages = await while_connected(request, composing.file())
    if body.return_stage_metrics:
        headers |= stages_header(stages)
    return Response(data, media_type=CONTENT_TYPES[body.response_format], headers=headers)
