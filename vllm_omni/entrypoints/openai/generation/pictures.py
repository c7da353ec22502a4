# SPDX-License-Identifier: Apache-2.0
"""Answers of the picture routes, in one piece and as OpenAI's events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pybase64
from PIL import Image

from vllm_omni.entrypoints.openai.error_handlers import error_event
from vllm_omni.entrypoints.openai.generation.fields import sampling_params
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.protocol.images import (
    ImageData,
    ImageRequest,
    ImageResponse,
    ImageUsage,
)
from vllm_omni.entrypoints.openai.stage_metrics import stages_told
from vllm_omni.media.image_encode import CONTENT_TYPES, encode_image
from vllm_omni.outputs import OmniRequestOutput

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Painting:
    """One request for pictures.

    Attributes:
        generation: Who makes them.
        body: What was asked for.
        media: Pictures that came along, by the engine's names.
        request_id: The engine's name for it.
        kind: What OpenAI's events are called after: `image_generation` or `image_edit`.
    """

    generation: Generation
    body: ImageRequest
    media: Mapping[str, Any]
    request_id: str
    kind: str

    async def whole(self) -> ImageResponse:
        """All pictures in one answer."""
        body = self.body
        last, pictures = None, []
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                last = output
                if output.progress is None:
                    pictures += output.images
        encoded = await asyncio.gather(*(self._encoded(picture) for picture in pictures))
        return ImageResponse(
            created=int(time.time()),
            data=[self._data(base64) for base64 in encoded],
            background=background_of(pictures, body),
            output_format=body.output_format,
            quality=body.quality,
            size=size_of(pictures),
            metrics=metrics_of(last) if body.return_stage_metrics else None,
        )

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events: previews, then one `completed` per picture.

        An error is the last event, and ends the stream in order (row A-47).
        """
        try:
            async with aclosing(self._pieces()) as pieces:
                async for name, fields in pieces:
                    yield _event(f"{self.kind}.{name}", fields)
        except Exception as error:  # the client is told, instead of a cut connection
            yield error_event(error, self.request_id)

    async def _pieces(self) -> AsyncGenerator[Event, None]:
        previews = done = 0
        async with aclosing(self._outputs()) as outputs:
            async for output in outputs:
                if output.progress is not None:
                    if output.images:
                        fields = await self._facts(output.images[0])
                        yield "partial_image", {**fields, "partial_image_index": previews}
                        previews += 1
                    continue
                for picture in output.images:
                    usage = ImageUsage().model_dump()
                    facts = await self._facts(picture)
                    more = {"metrics": metrics_of(output)} if self._wants_metrics else {}
                    yield "completed", {**facts, "index": done, "usage": usage, **more}
                    done += 1

    @property
    def _wants_metrics(self) -> bool:
        return self.body.return_stage_metrics

    async def _facts(self, picture: Image.Image) -> dict[str, Any]:
        """What OpenAI's events of both kinds have in common."""
        body = self.body
        return {
            "b64_json": await self._encoded(picture),
            "created_at": int(time.time()),
            "size": size_of([picture]),
            "quality": body.quality or "auto",
            "background": background_of([picture], body),
            "output_format": body.output_format,
        }

    async def _encoded(self, picture: Image.Image) -> str:
        """The picture's file in base64."""
        body = self.body
        return await asyncio.to_thread(
            _as_base64, picture, body.output_format, body.output_compression, body.background
        )

    def _data(self, base64: str) -> ImageData:
        if self.body.response_format == "b64_json":
            return ImageData(b64_json=base64)
        return ImageData(url=f"data:{CONTENT_TYPES[self.body.output_format]};base64,{base64}")

    async def _outputs(self) -> AsyncGenerator[OmniRequestOutput, None]:
        prompt: dict[str, Any] = {"prompt": self.body.prompt}
        if self.body.negative_prompt is not None:
            prompt["negative_prompt"] = self.body.negative_prompt
        if self.media:
            prompt["multi_modal_data"] = self.media
        params = self.params()
        async with aclosing(
            self.generation.outputs(self.body, prompt, params, self.request_id)
        ) as outputs:
            async for output in outputs:
                for picture in output.images:
                    # Of a pipeline whose own size could not be told before.
                    self.generation.check_size(picture.size, "size")
                yield output

    def params(self) -> Any:
        """What the engine is asked.

        Raises:
            OmniClientError: A field is at fault.
        """
        body = self.body
        size = body.dimensions()
        self.generation.check_size(size, "size" if body.width is None else "width")
        if body.resolution is not None:
            self.generation.check_size((body.resolution, body.resolution), "resolution")
        width, height = size or (None, None)
        own = {
            "system_prompt": body.system_prompt,
            "use_system_prompt": body.use_system_prompt,
            "bot_task": body.bot_task,
            "sys_type": body.sys_type,
        }
        scale = body.cfg_scale if body.true_cfg_scale is None else body.true_cfg_scale
        return sampling_params(
            body,
            own,
            width=width,
            height=height,
            true_cfg_scale=scale,
            max_pixels=self.generation.max_pixels,
            transparent=body.background == "transparent",
            num_outputs_per_prompt=body.count,
            layers=body.layers,
            resolution=body.resolution,
            previews=body.partial_images,
        )


def _event(name: str, fields: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"


def size_of(pictures: list[Image.Image]) -> str:
    """WIDTHxHEIGHT of the first one."""
    return f"{pictures[0].width}x{pictures[0].height}" if pictures else "auto"


def background_of(pictures: list[Image.Image], body: ImageRequest) -> str:
    """What became of the background that was asked for."""
    clear = any(picture.mode in ("RGBA", "LA") for picture in pictures)
    kept = clear and body.output_format != "jpeg" and body.background != "opaque"
    return "transparent" if kept else "opaque"


def metrics_of(output: OmniRequestOutput | None) -> dict[str, Any]:
    """The stages' timing, as chat responses have it, and the seed."""
    if output is None:
        return {}
    return {"stages": stages_told(output.stage_metrics), "seed": output.seed}


def _as_base64(picture: Image.Image, format: str, compression: int | None, background: str) -> str:
    data = encode_image(picture, format, compression=compression, background=background)
    return pybase64.b64encode(data).decode()
