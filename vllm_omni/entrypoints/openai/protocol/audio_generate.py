# SPDX-License-Identifier: Apache-2.0
"""Body of `/v1/audio/generate`: sounds and music from a text."""

from typing import Literal

from pydantic import Field

from vllm_omni.entrypoints.openai.protocol.diffusion import DiffusionRequest, Prompt

MIN_SECONDS = 0.01
MAX_SECONDS = 600.0


class AudioGenerateRequest(DiffusionRequest):
    """Body of `/v1/audio/generate`."""

    input: Prompt = Field(description="What should be heard.")
    audio_length: float | None = Field(
        default=None, ge=MIN_SECONDS, le=MAX_SECONDS, description="Length in seconds."
    )
    audio_start: float = Field(
        default=0.0, ge=0, le=MAX_SECONDS, description="Where to begin, in seconds."
    )
    num_frames: int | None = Field(default=None, ge=1, le=1_000_000, description="Latent frames.")
    frame_rate: float | None = Field(default=None, gt=0, le=1000, description="Of those, a second.")
    response_format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm"] = Field(
        default="wav", description="The file's format."
    )
    speed: float = Field(default=1.0, ge=0.25, le=4.0, description="How fast to play it.")
