# SPDX-License-Identifier: Apache-2.0
"""One request for a sound from a text."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.entrypoints.openai.generation.fields import sampling_params
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.protocol.audio_generate import AudioGenerateRequest
from vllm_omni.errors import OmniGenerateError
from vllm_omni.media.audio_encode import encode
from vllm_omni.media.tempo import with_tempo
from vllm_omni.outputs import AudioOutput, StageMetrics

_NAMES: Mapping[str, str] = {"prompt": "input", "fps": "frame_rate"}


@dataclass(frozen=True, slots=True)
class Composing:
    """One request for a sound.

    Attributes:
        generation: Who makes it.
        body: What was asked for.
        request_id: The engine's name for it.
    """

    generation: Generation
    body: AudioGenerateRequest
    request_id: str

    def params(self) -> Any:
        """What the engine is asked.

        Raises:
            OmniClientError: A field is at fault.
        """
        body = self.body
        return sampling_params(
            body,
            names=_NAMES,
            audio_length=body.audio_length,
            audio_start=body.audio_start or None,
            num_frames=body.num_frames,
            fps=body.frame_rate,
        )

    async def file(self) -> tuple[bytes, tuple[StageMetrics, ...]]:
        """The sound as a file, and the stages' timing."""
        made, stages = await self.sound()
        body = self.body
        data = await asyncio.to_thread(_file, made, body.response_format, body.speed)
        return data, stages

    async def sound(self) -> tuple[AudioOutput, tuple[StageMetrics, ...]]:
        """The sound as the engine gives it, and the stages' timing."""
        body = self.body
        prompt: dict[str, Any] = {"prompt": body.input}
        if body.negative_prompt is not None:
            prompt["negative_prompt"] = body.negative_prompt
        outputs = self.generation.outputs(
            body, prompt, self.params(), self.request_id, names=_NAMES
        )
        made: AudioOutput | None = None
        stages: tuple[StageMetrics, ...] = ()
        async with aclosing(outputs):
            async for output in outputs:
                made = output.audio or made
                stages = output.stage_metrics or stages
        if made is None:
            raise OmniGenerateError("the pipeline made no sound")
        return made, stages


def first_sound(made: AudioOutput) -> np.ndarray:
    """Of several, the first one: float32 [samples, channels], at most stereo."""
    samples = made.samples
    while samples.ndim > 2:
        samples = samples[0]
    if samples.ndim == 1:
        samples = samples[None]
    return np.ascontiguousarray(samples[:2].T, np.float32)


def _file(made: AudioOutput, format: str, speed: float) -> bytes:
    samples = with_tempo(first_sound(made), made.sample_rate, speed)
    return encode(samples, made.sample_rate, format, param="response_format")
