# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations and /v1/images/edits."""

import asyncio
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from PIL import Image
from starlette.datastructures import UploadFile
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive

from vllm_omni.entrypoints.openai.forms import form_schema, read_form
from vllm_omni.entrypoints.openai.generation.disconnect import while_connected
from vllm_omni.entrypoints.openai.generation.pictures import Painting
from vllm_omni.entrypoints.openai.generation.service import (
    Generation,
    generation_of,
    request_id_of,
)
from vllm_omni.entrypoints.openai.protocol.diffusion import at_fault
from vllm_omni.entrypoints.openai.protocol.images import (
    ImageEditRequest,
    ImageGenerationRequest,
    ImageResponse,
)
from vllm_omni.entrypoints.openai.routes.errors import ERRORS

router = APIRouter()

MAX_INPUT_IMAGES = 16
EDIT_FILES = ("image", "mask")
EDIT_OBJECTS = ("lora", "extra_params", "extra_args", "extra_body")
OK: dict[str, Any] = {"model": ImageResponse, "content": {"text/event-stream": {}}}


@router.post(
    "/v1/images/generations",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: OK, **ERRORS},
)
async def create_images(body: ImageGenerationRequest, request: Request) -> Response:
    """Paint pictures from a text."""
    generation = generation_of(request)
    generation.check_makes("image")
    generation.served_name(body.model)
    await asyncio.to_thread(generation.check_fields, body)
    request_id = request_id_of(request, "img")
    return await _answered(request, Painting(generation, body, {}, request_id, "image_generation"))


@router.post(
    "/v1/images/edits",
    response_model=None,
    responses={HTTPStatus.OK.value: OK, **ERRORS},
    openapi_extra=form_schema(ImageEditRequest, EDIT_FILES, objects=EDIT_OBJECTS, lists=("image",)),
)
async def edit_images(request: Request) -> Response:
    """Change pictures as a text says."""
    generation = generation_of(request)
    generation.check_makes("image")
    async with read_form(
        request,
        ImageEditRequest,
        files=EDIT_FILES,
        objects=EDIT_OBJECTS,
        lists=("url",),
        max_field_bytes=request.app.state.args.max_body_bytes,
    ) as form:
        body = form.fields
        generation.served_name(body.model)
        await asyncio.to_thread(generation.check_fields, body)
        sources = [*(("image", file) for file in form.files.get("image", ()))]
        sources += [("url", url) for url in body.url]
        reading = _media(generation, sources, form.files.get("mask", []))
        media = await while_connected(request, reading)
    painting = Painting(generation, body, media, request_id_of(request, "edit"), "image_edit")
    return await _answered(request, painting)


async def _media(
    generation: Generation, sources: list[tuple[str, UploadFile | str]], masks: list[UploadFile]
) -> dict[str, list[Image.Image] | Image.Image]:
    if not sources:
        raise at_fault("image", "should be given: a file, or a URL in `url`")
    if len(sources) > MAX_INPUT_IMAGES:
        raise at_fault("image", f"at most {MAX_INPUT_IMAGES} pictures")
    if len(masks) > 1:
        raise at_fault("mask", "at most one")
    read = generation.references
    pictures = [await read.image(source, field) for field, source in sources]
    media: dict[str, list[Image.Image] | Image.Image] = {"image": pictures}
    if masks:
        media["mask_image"] = await read.mask(masks[0], pictures[0].size, "mask")
    return media


async def _answered(request: Request, painting: Painting) -> Response:
    painting.params()  # what can be told before anything is sent has its HTTP status
    if painting.body.stream:
        events = painting.events()
        keep_alive_s = request.app.state.args.sse_keep_alive_interval
        if keep_alive_s > 0:
            events = with_sse_keep_alive(events, keep_alive_s)
        return StreamingResponse(events, media_type="text/event-stream")
    whole = await while_connected(request, painting.whole())
    return JSONResponse(whole.model_dump(exclude_none=True))
