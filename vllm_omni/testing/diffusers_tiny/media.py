# SPDX-License-Identifier: Apache-2.0
"""Example requests for videos and sounds, and the clips that they start from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm_omni.testing.diffusers_tiny.recipe import (
    NEGATIVE_PROMPT,
    PROMPT,
    Example,
    left_half,
    picture,
)


@dataclass(frozen=True, slots=True)
class Shot:
    """What the inputs of a request look like: pixels, frames and what they show."""

    height: int
    width: int
    frames: int
    seed: int


MakeInput = Callable[[Shot], Any]


@dataclass(frozen=True, slots=True)
class VideoExample(Example):
    """A small request to a pipeline class that makes videos.

    Attributes:
        frames: The argument with the number of frames; None where the input video says it.
        default_frames: Frames of the smallest request worth making.
        inputs: Argument -> what makes the input image, video or list from the request's shape.
    """

    output: str = "frames"
    frames: str | None = "num_frames"
    default_frames: int = 5
    inputs: Mapping[str, MakeInput] = field(default_factory=dict)

    def arguments(
        self,
        prompt: str = PROMPT,
        *,
        negative_prompt: str = NEGATIVE_PROMPT,
        height: int = 32,
        width: int = 32,
        steps: int = 2,
        guidance: float = 3.0,
        image_seed: int = 0,
        frames: int | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of the stock `__call__`; `generator` and `output_type` are up to you.

        Args:
            image_seed: What the input images and videos show.
            frames: Frames of the video and of its inputs.
        """
        arguments = Example.arguments(
            self,
            prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            steps=steps,
            guidance=guidance,
            image_seed=image_seed,
        )
        shot = Shot(height, width, frames or self.default_frames, image_seed)
        if self.frames is not None:
            arguments[self.frames] = shot.frames
        return arguments | {name: make(shot) for name, make in self.inputs.items()}


@dataclass(frozen=True, slots=True)
class AudioExample(Example):
    """A small request to a pipeline class that makes sounds.

    Attributes:
        seconds: The argument with the length, in seconds.
        default_seconds: Length of the smallest request worth making.
    """

    sized: bool = False
    output: str = "audios"
    seconds: str = "audio_length_in_s"
    default_seconds: float = 0.5

    def arguments(
        self,
        prompt: str = PROMPT,
        *,
        negative_prompt: str = NEGATIVE_PROMPT,
        height: int = 0,
        width: int = 0,
        steps: int = 2,
        guidance: float = 3.0,
        image_seed: int = 0,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of the stock `__call__`; `generator` and `output_type` are up to you.

        Args:
            height: Has no meaning here, as `width` and `image_seed`.
            seconds: Length of the sound.
        """
        arguments = Example.arguments(
            self, prompt, negative_prompt=negative_prompt, steps=steps, guidance=guidance
        )
        return arguments | {self.seconds: seconds or self.default_seconds}


def first_frame(shot: Shot) -> Image.Image:
    return picture(shot.height, shot.width, shot.seed)


def last_frame(shot: Shot) -> Image.Image:
    return picture(shot.height, shot.width, shot.seed + 1)


def clip(shot: Shot) -> list[Image.Image]:
    """A picture that fades into another one."""
    first, last = first_frame(shot), last_frame(shot)
    steps = max(shot.frames - 1, 1)
    return [Image.blend(first, last, index / steps) for index in range(shot.frames)]


def mask_clip(shot: Shot) -> list[Image.Image]:
    """The left half of each frame is to be painted anew."""
    return [left_half(shot.height, shot.width)] * shot.frames


def clip_array(shot: Shot) -> np.ndarray:
    """`clip` as float32 [frames, height, width, 3] of 0..1."""
    return np.stack([np.asarray(frame, np.float32) / 255 for frame in clip(shot)])


def tone(seconds: float, rate: int, channels: int = 2) -> torch.Tensor:
    """A sound of two tones, float32 [channels, samples]."""
    time = torch.arange(round(seconds * rate)) / rate
    wave = 0.3 * torch.sin(2 * torch.pi * 220 * time) + 0.2 * torch.sin(2 * torch.pi * 331 * time)
    return wave.expand(channels, -1)
