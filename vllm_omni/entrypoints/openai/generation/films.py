# SPDX-License-Identifier: Apache-2.0
"""One request for a video: what it brings, what the engine is asked, the file that comes out."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.datastructures import UploadFile

from vllm_omni.entrypoints.admission import current_ticket
from vllm_omni.entrypoints.openai.forms import Form
from vllm_omni.entrypoints.openai.generation.disconnect import in_thread
from vllm_omni.entrypoints.openai.generation.fields import in_fields_of, sampling_params
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.protocol.diffusion import at_fault
from vllm_omni.entrypoints.openai.protocol.videos import (
    MAX_FRAMES,
    MAX_REFERENCES,
    VideoGenerationRequest,
)
from vllm_omni.entrypoints.openai.videos.jobs import JobHandle, VideoFacts
from vllm_omni.entrypoints.openai.videos.store import cannot_keep
from vllm_omni.errors import OmniClientError, OmniGenerateError
from vllm_omni.media.video_encode import DEFAULT_CRF, write_video
from vllm_omni.outputs import OmniRequestOutput, VideoOutput

DEFAULT_FPS = 24.0
"""Of a video whose request says none."""
MAX_INPUT_FRAMES = 1024
FILES = ("input_reference",)
OBJECTS = (
    *("image_reference", "video_reference", "audio_reference"),
    *("lora", "extra_params", "extra_args", "extra_body"),
)

_PICTURES = ("image", "last_image", "reference_images")


def sync_timeout_s() -> float:
    """Seconds that `/v1/videos/sync` may take (row A-43), as the server's environment says.

    Not read when this is imported: a forked server has imported it with another environment.
    """
    return float(os.environ.get("VLLM_OMNI_VIDEO_SYNC_TIMEOUT", 600.0))


@dataclass(frozen=True, slots=True)
class Filming:
    """One request for a video.

    Attributes:
        generation: Who makes it.
        body: What was asked for.
        media: What came along, by the engine's names.
        request_id: The engine's name for it.
    """

    generation: Generation
    body: VideoGenerationRequest
    media: Mapping[str, Any]
    request_id: str

    def params(self, progress: bool = False) -> Any:
        """What the engine is asked.

        Raises:
            OmniClientError: A field is at fault.
        """
        body = self.body
        size = body.dimensions()
        frames = body.frames(DEFAULT_FPS)
        self.generation.check_size(size, _size_field(body), frames or 1)
        if frames is not None and frames > MAX_FRAMES:
            raise at_fault("seconds", f"{frames} frames are more than the {MAX_FRAMES} allowed")
        width, height = size or (None, None)
        return sampling_params(
            body,
            names=_names(body),
            width=width,
            height=height,
            max_pixels=self.generation.max_pixels,
            num_frames=frames,
            fps=body.fps,
            progress=progress,
        )

    def check(self) -> None:
        """Refuse now what the pipeline would refuse; not for the event loop.

        Raises:
            OmniClientError: A field is at fault.
        """
        try:
            self.generation.check_model(self.body, self.media)
        except OmniClientError as error:
            raise in_fields_of(error, self.body, _names(self.body)) from error

    async def shot(
        self,
        progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> OmniRequestOutput:
        """The engine's output with the video.

        Args:
            progress: Called with percent.
            timeout: Seconds that it may take.
        """
        body = self.body
        prompt: dict[str, Any] = {"prompt": body.prompt}
        if body.negative_prompt is not None:
            prompt["negative_prompt"] = body.negative_prompt
        if self.media:
            prompt["multi_modal_data"] = self.media
        params = self.params(progress is not None)
        outputs = self.generation.outputs(
            body, prompt, params, self.request_id, timeout=timeout, names=_names(body)
        )
        made: OmniRequestOutput | None = None
        async with aclosing(outputs):
            async for output in outputs:
                if output.video is not None and output.progress is None:
                    made = output
                elif output.progress is not None and progress is not None:
                    progress(99 * output.progress.step // max(1, output.progress.steps))
        if made is None or made.video is None:
            raise OmniGenerateError("the pipeline made no video")
        height, width = made.video.frames.shape[2:4]
        # Of a pipeline whose own size could not be told before.
        self.generation.check_size((width, height), _size_field(body))
        return made

    async def work(self, handle: JobHandle) -> VideoFacts:
        """Make the video in the background; waits for its own turn."""
        current_ticket.set(None)  # that of the request which asked for it
        began = time.monotonic()
        output = await self.shot(handle.progress)
        inference_s = time.monotonic() - began
        size = await self.write(handle.path, output)
        metrics = {"inference_time_s": inference_s, "total_time_s": time.monotonic() - began}
        stages = output.stage_metrics if self.body.return_stage_metrics else ()
        return VideoFacts(*size, metrics, stages)

    async def write(self, path: Path | str, output: OmniRequestOutput) -> tuple[int, int]:
        """Write the file; its width and height.

        Raises:
            StorageFullError: There is no room for it.
            OmniGenerateError: It cannot be written for another reason.
        """
        assert output.video is not None
        video, body = output.video, self.body
        silent = body.generate_sound is False
        sound = None if silent else _sound(video)
        frames = video.frames[0]
        fps = video.fps or body.fps or DEFAULT_FPS
        crf = DEFAULT_CRF if body.quality is None else 40 - 3 * body.quality
        try:
            await in_thread(write_video, path, frames, fps, sound, video.sample_rate, crf=crf)
        except OSError as error:
            raise cannot_keep(error) from error
        return frames.shape[2], frames.shape[1]


async def read_media(generation: Generation, form: Form[VideoGenerationRequest]) -> dict[str, Any]:
    """What a request brings, by the engine's names.

    Raises:
        OmniClientError: Something is wrong with it, or it brings what does not go together.
    """
    body, uploads = form.fields, form.files.get("input_reference", [])
    given = {
        "input_reference": bool(uploads),
        "image_reference": body.image_reference is not None,
        "video_reference": body.video_reference is not None,
    }
    if sum(given.values()) > 1:
        several = [name for name, is_given in given.items() if is_given]
        raise at_fault(several[1], f"only one of {', '.join(several)} may be given")
    read = generation.references
    media: dict[str, Any] = {}
    if body.audio_reference is not None:
        media["audio"] = await read.audio(body.audio_reference.audio_url, "audio_reference")
    if body.video_reference is not None:
        url = body.video_reference.video_url
        media |= {"video": await read.video(url, "video_reference", MAX_INPUT_FRAMES)}
    elif len(uploads) == 1 and (uploads[0].content_type or "").startswith("video/"):
        media |= {"video": await read.video(uploads[0], "input_reference", MAX_INPUT_FRAMES)}
    elif uploads:
        media |= await _pictures(generation, uploads, "input_reference")
    elif body.image_reference is not None:
        urls = [each.image_url for each in body.image_reference]
        media |= await _pictures(generation, urls, "image_reference")
    return media


async def _pictures(
    generation: Generation, sources: list[UploadFile] | list[str], param: str
) -> dict[str, Any]:
    """One picture is where the video begins, a second one where it ends; more are references."""
    if not 1 <= len(sources) <= MAX_REFERENCES:
        raise at_fault(param, f"from 1 to {MAX_REFERENCES} pictures")
    pictures = [await generation.references.image(source, param) for source in sources]
    if len(pictures) > 2:
        return {"reference_images": pictures}
    return dict(zip(("image", "last_image"), pictures, strict=False))


def _names(body: VideoGenerationRequest) -> Mapping[str, str]:
    """Names of the engine -> fields of this request."""
    pictures = "input_reference" if body.image_reference is None else "image_reference"
    return {
        "num_outputs_per_prompt": "num_outputs_per_prompt",
        **dict.fromkeys(_PICTURES, pictures),
        "video": "input_reference" if body.video_reference is None else "video_reference",
        "audio": "audio_reference",
    }


def _sound(video: VideoOutput) -> np.ndarray | None:
    """Of the first video, as files have it: [samples, channels]; at most stereo."""
    if video.audio is None or video.sample_rate is None:
        return None
    return np.ascontiguousarray(video.audio[0][:2].T)


def _size_field(body: VideoGenerationRequest) -> str:
    if body.width is not None:
        return "width"
    return "size" if body.size is not None or body.short_edge is None else "short_edge"
