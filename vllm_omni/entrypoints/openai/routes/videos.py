# SPDX-License-Identifier: Apache-2.0
"""/v1/videos: make videos in the background, follow, fetch and delete them; and in one go."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from vllm_omni.entrypoints.admission import current_client
from vllm_omni.entrypoints.openai.forms import form_schema, read_form
from vllm_omni.entrypoints.openai.generation.disconnect import in_thread, while_connected
from vllm_omni.entrypoints.openai.generation.films import (
    FILES,
    OBJECTS,
    Filming,
    read_media,
)
from vllm_omni.entrypoints.openai.generation.service import generation_of, request_id_of
from vllm_omni.entrypoints.openai.protocol.videos import (
    POLL_AFTER_MS,
    VideoDeleted,
    VideoError,
    VideoGenerationRequest,
    VideoList,
    VideoObject,
)
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.openai.stage_metrics import stages_header, stages_told
from vllm_omni.entrypoints.openai.videos.content import ContentResponse, path_of
from vllm_omni.entrypoints.openai.videos.job import VideoJob
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.store import MAX_PAGE
from vllm_omni.errors import OmniClientError, is_client_error_status
from vllm_omni.media.video_encode import VIDEO_CONTENT_TYPE
from vllm_omni.media.video_stills import STILL_CONTENT_TYPE, spritesheet, thumbnail
from vllm_omni.outputs import StageMetrics

router = APIRouter()

POLL_HEADER = "openai-poll-after-ms"
FORM = form_schema(VideoGenerationRequest, FILES, objects=OBJECTS, lists=FILES)


@router.post(
    "/v1/videos",
    response_model=None,
    responses={HTTPStatus.OK.value: {"model": VideoObject}, **ERRORS},
    openapi_extra=FORM,
)
async def create_video(request: Request) -> Response:
    """Begin to make a video; the answer says how to ask for it."""
    async with _filming(request) as filming:
        size = filming.body.dimensions()
        seconds = filming.body.seconds
        job = _jobs(request).start(
            filming.work,
            owner=_owner(),
            model=filming.generation.served_name(filming.body.model),
            prompt=filming.body.prompt,
            seconds=None if seconds is None else f"{seconds:g}",
            size=None if size is None else f"{size[0]}x{size[1]}",
        )
    return _described(job)


@router.post(
    "/v1/videos/sync",
    response_model=None,
    responses={HTTPStatus.OK.value: {"content": {VIDEO_CONTENT_TYPE: {}}}, **ERRORS},
    openapi_extra=FORM,
)
async def create_video_in_one_go(request: Request) -> Response:
    """Make a video; the answer is the file."""
    async with _filming(request) as filming:
        began = time.monotonic()
        made = _filmed(filming, _sync_timeout(request))
        data, stages = await while_connected(request, made)
        seconds = time.monotonic() - began
    headers = {
        **filming.generation.model_header(filming.body.model),
        "X-Inference-Time-S": f"{seconds:.3f}",
    }
    if filming.body.return_stage_metrics:
        headers |= stages_header(stages)
    return Response(data, media_type=VIDEO_CONTENT_TYPE, headers=headers)


@router.get("/v1/videos", responses=ERRORS)
async def list_videos(
    request: Request,
    after: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> VideoList:
    """The client's videos."""
    jobs, more = _jobs(request).page(_owner(), after=after, limit=limit, order=order)
    return VideoList(
        data=[_object(job) for job in jobs],
        first_id=jobs[0].id if jobs else None,
        last_id=jobs[-1].id if jobs else None,
        has_more=more,
    )


@router.get(
    "/v1/videos/{video_id}",
    response_model=None,
    responses={HTTPStatus.OK.value: {"model": VideoObject}, **ERRORS},
)
async def retrieve_video(request: Request, video_id: str) -> Response:
    """How far a video is. If its request was at fault, that is the answer."""
    return _described(_jobs(request).get(video_id, _owner()))


@router.delete("/v1/videos/{video_id}", responses=ERRORS)
async def delete_video(request: Request, video_id: str) -> VideoDeleted:
    """Forget a video, and stop making it."""
    await _jobs(request).delete(video_id, _owner())
    return VideoDeleted(id=video_id)


@router.get(
    "/v1/videos/{video_id}/content",
    response_model=None,
    responses={HTTPStatus.OK.value: {"content": {VIDEO_CONTENT_TYPE: {}}}, **ERRORS},
)
async def retrieve_content(
    request: Request,
    video_id: str,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
) -> Response:
    """The file, or still pictures of it."""
    jobs = _jobs(request)
    job = jobs.get(video_id, _owner())
    if job.status != "completed":
        raise OmniClientError(
            f"video_id: {job.id} is {job.status}, so there is no content",
            param="video_id",
            code="video_not_ready",
        )
    file = jobs.content(job.id)
    if variant == "video":
        return ContentResponse(file, VIDEO_CONTENT_TYPE, f"{job.id}.mp4")
    make = thumbnail if variant == "thumbnail" else spritesheet
    with file:
        return Response(await in_thread(make, Path(path_of(file))), media_type=STILL_CONTENT_TYPE)


@asynccontextmanager
async def _filming(request: Request) -> AsyncIterator[Filming]:
    """The request as it came, checked as far as can be told before it is made."""
    generation = generation_of(request)
    generation.check_makes("video")
    async with read_form(
        request,
        VideoGenerationRequest,
        files=FILES,
        objects=OBJECTS,
        max_field_bytes=request.app.state.args.max_body_bytes,
    ) as form:
        generation.served_name(form.fields.model)
        await asyncio.to_thread(generation.check_fields, form.fields)
        unread = Filming(generation, form.fields, {}, request_id_of(request, "video"))
        unread.params()
        media = await while_connected(request, read_media(generation, form))
    filming = Filming(generation, form.fields, media, unread.request_id)
    await asyncio.to_thread(filming.check)
    yield filming


async def _filmed(filming: Filming, timeout: float) -> tuple[bytes, tuple[StageMetrics, ...]]:
    """The file, and the stages' timing."""
    output = await filming.shot(timeout=timeout)
    # It has no name, so nothing of it is left however this process ends.
    with tempfile.TemporaryFile() as file:
        await filming.write(path_of(file), output)
        return await in_thread(file.read), output.stage_metrics


def _sync_timeout(request: Request) -> float:
    """Seconds."""
    timeout: float = request.app.state.omni_video_sync_timeout
    return timeout


def _jobs(request: Request) -> VideoJobs:
    generation_of(request).check_makes("video")
    jobs: VideoJobs = request.app.state.omni_video_jobs
    return jobs


def _owner() -> str:
    """Who may see a video: the key that asked for it, or everybody on a server without keys."""
    client = current_client.get()
    return client if client.startswith("key:") else ""


def _described(job: VideoJob) -> Response:
    headers = {} if job.is_over else {POLL_HEADER: str(POLL_AFTER_MS)}
    at_fault = job.error is not None and is_client_error_status(job.error.status_code)
    status = HTTPStatus.BAD_REQUEST if at_fault else HTTPStatus.OK
    return JSONResponse(_object(job).model_dump(), status, headers)


def _object(job: VideoJob) -> VideoObject:
    error = job.error and VideoError(
        code=str(job.error.status_code),
        message=job.error.message,
        type=job.error.type,
        param=job.error.param,
    )
    metrics: dict[str, Any] = dict(job.metrics)
    if job.stages:
        metrics["stages"] = stages_told(job.stages)
    return VideoObject(
        id=job.id,
        status=job.status,
        progress=job.progress,
        created_at=job.created_at,
        completed_at=job.completed_at,
        expires_at=job.expires_at,
        model=job.model,
        prompt=job.prompt,
        seconds=job.seconds,
        size=job.size,
        error=error,
        metrics=metrics or None,
    )
