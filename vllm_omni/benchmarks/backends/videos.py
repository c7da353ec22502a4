# SPDX-License-Identifier: Apache-2.0
"""`/v1/videos/sync`, and `/v1/videos` with its jobs."""

import asyncio
import io

import aiohttp
import av
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.benchmarks.backends.calling import AnswerError, check, headers_of, model_of, post
from vllm_omni.benchmarks.backends.images import form_of, steps_of
from vllm_omni.benchmarks.backends.media import content_of, items
from vllm_omni.benchmarks.outputs import OmniOutput

POLL_S = 0.1
"""Between two looks at a job; its latency is longer by up to this."""


async def film(asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput) -> None:
    """Have a video made; of a job, wait for its end and fetch the file."""
    output.steps = steps_of(asked)
    in_one_go = asked.api_url.endswith("/sync")
    async with post(asked, session, data=_form(asked)) as response:
        await check(response)
        data = await (response.read() if in_one_go else _fetch(asked, session, response))
        output.ended()
    output.video_frames, output.video_s = await asyncio.to_thread(_length, data)


def _form(asked: RequestFuncInput) -> aiohttp.FormData:
    fields = {"model": model_of(asked), "prompt": asked.prompt} | (asked.extra_body or {})
    form = form_of(fields)
    for url in items(asked, "image_url")[:1]:
        media_type, data = content_of(url)
        form.add_field("input_reference", data, filename="first.jpg", content_type=media_type)
    return form


async def _fetch(
    asked: RequestFuncInput, session: aiohttp.ClientSession, begun: aiohttp.ClientResponse
) -> bytes:
    job = await begun.json()
    url, headers = f"{asked.api_url}/{job['id']}", headers_of(asked)
    while job["status"] in ("queued", "in_progress"):
        await asyncio.sleep(POLL_S)
        async with session.get(url, headers=headers) as response:
            await check(response)
            job = await response.json()
    if job["status"] != "completed":
        raise AnswerError(f"the video has {job['status']}: {job.get('error')}")
    async with session.get(f"{url}/content", headers=headers) as response:
        await check(response)
        return await response.read()


def _length(data: bytes) -> tuple[int, float]:
    """Frames and seconds of a file, by its index."""
    with av.open(io.BytesIO(data)) as file:
        (stream, *_) = file.streams.video
        if not stream.frames or stream.average_rate is None:
            raise AnswerError("the answer's video has no frame")
        return stream.frames, float(stream.frames / stream.average_rate)
