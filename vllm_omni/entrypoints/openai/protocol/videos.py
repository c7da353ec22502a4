# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/videos`: OpenAI's video object, and what diffusion adds to its request."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from vllm_omni.entrypoints.openai.protocol.diffusion import (
    MAX_SIDE,
    MIN_SIDE,
    DiffusionRequest,
    Name,
    Prompt,
    Side,
    at_fault,
    check_sides,
    check_size,
    contradiction,
)

MAX_SECONDS = 600.0
MAX_FRAMES = 10_000
MIN_FPS, MAX_FPS = 0.01, 120.0
MAX_REFERENCES = 16
POLL_AFTER_MS = 1000

NOTHING = ("", "none", "false", "0")
"""Values with which clients leave a field unused."""
NOT_HERE = (
    *("frame_interpolation_exp", "frame_interpolation_scale", "frame_interpolation_model_path"),
    *("enable_frame_interpolation", "control_type", "start_time_seconds", "sound_duration"),
    *("timeline_guides", "source_video", "source_audio", "video_noise_mask", "audio_noise_mask"),
    *("control_reference", "guide_files"),
)
"""Fields of vLLM-Omni's that no pipeline here has a use for."""

Url = Annotated[str, StringConstraints(min_length=1)]


class UrlImageReference(BaseModel):
    """A picture by its URL."""

    model_config = ConfigDict(extra="forbid")

    image_url: Url


class UrlVideoReference(BaseModel):
    """A video by its URL."""

    model_config = ConfigDict(extra="forbid")

    video_url: Url


class UrlAudioReference(BaseModel):
    """A sound by its URL (row A-40)."""

    model_config = ConfigDict(extra="forbid")

    audio_url: Url


class VideoGenerationRequest(DiffusionRequest):
    """Fields of `/v1/videos` and `/v1/videos/sync` beside their files."""

    prompt: Prompt = Field(description="What should be seen.")
    seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS, description="Length.")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT, or auto.")
    width: Side | None = Field(default=None, description="With `height`, instead of `size`.")
    height: Side | None = Field(default=None, description="With `width`, instead of `size`.")
    aspect_ratio: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d{0,3}:[1-9]\d{0,3}$",
        description="WIDTH:HEIGHT, with `short_edge`.",
    )
    short_edge: int | None = Field(
        default=None, ge=MIN_SIDE, le=MAX_SIDE, description="The shorter side, in pixels."
    )
    num_frames: int | None = Field(default=None, ge=1, le=MAX_FRAMES, description="Frames.")
    fps: float | None = Field(
        default=None, ge=MIN_FPS, le=MAX_FPS, description="Frames per second."
    )
    num_outputs_per_prompt: int = Field(default=1, ge=1, le=1, description="One video a request.")
    quality: int | None = Field(
        default=None, ge=0, le=10, description="Of the MP4: 0 smallest, 10 best."
    )
    image_reference: list[UrlImageReference] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_REFERENCES,
        description="Pictures to begin with, by URL; one need not be a list.",
    )
    video_reference: UrlVideoReference | None = Field(
        default=None, description="A video to begin with, by URL."
    )
    audio_reference: UrlAudioReference | None = Field(
        default=None, description="A sound to speak or move to, by URL; beside a picture or video."
    )
    generate_sound: bool | None = Field(default=None, description="With sound, if the model can.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_it_would_ignore(cls, data: Any) -> Any:
        for name in NOT_HERE:
            if isinstance(data, dict) and str(data.get(name, "")).lower() not in NOTHING:
                raise at_fault(name, "is not supported")
        return data

    def unknown(self) -> dict[str, Any]:
        """What was given and is no field of this request."""
        return {n: value for n, value in super().unknown().items() if n not in NOT_HERE}

    @field_validator("image_reference", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: str | None) -> str | None:
        return check_size(size)

    @model_validator(mode="after")
    def _check_together(self) -> "VideoGenerationRequest":
        check_sides(self.width, self.height, self.size)
        if (self.aspect_ratio is None) != (self.short_edge is None):
            missing = "aspect_ratio" if self.aspect_ratio is None else "short_edge"
            raise at_fault(missing, "should be given with the other of the two")
        shaped, sized = self._by_shape(), self._by_sides()
        if shaped is not None and sized is not None and shaped != sized:
            other = "size" if self.size is not None else "width` and `height"
            raise contradiction("aspect_ratio", f"short_edge` with `{other}")
        return self

    def dimensions(self) -> tuple[int, int] | None:
        """The (width, height) that was asked for, if one was."""
        return self._by_sides() or self._by_shape()

    def _by_sides(self) -> tuple[int, int] | None:
        if self.width is not None and self.height is not None:
            return self.width, self.height
        if self.size is not None:
            width, _, height = self.size.partition("x")
            return int(width), int(height)
        return None

    def _by_shape(self) -> tuple[int, int] | None:
        if self.aspect_ratio is None or self.short_edge is None:
            return None
        across, down = (int(part) for part in self.aspect_ratio.split(":"))
        factor = self.short_edge / min(across, down)
        return _even(across * factor), _even(down * factor)

    def frames(self, default_fps: float) -> int | None:
        """How many frames were asked for, if any number was.

        Raises:
            OmniClientError: `num_frames` and `seconds` differ by more than a frame: the first one
                (at 0 s) may be counted or not.
        """
        if self.seconds is None:
            return self.num_frames
        frames = max(1, round(self.seconds * (self.fps or default_fps)))
        if self.num_frames is None:
            return frames
        if abs(self.num_frames - frames) > 1:
            raise at_fault(
                "num_frames",
                f"contradicts `seconds`, which are {frames} frames at {self.fps or default_fps:g} "
                "`fps`; give one of them",
            )
        return self.num_frames


def _even(side: float) -> int:
    return max(2, round(side / 2) * 2)


class VideoError(BaseModel):
    """Why a video failed: OpenAI's fields, and those of our other errors."""

    code: str
    message: str
    type: str | None = None
    param: str | None = None


class VideoObject(BaseModel):
    """OpenAI's video object."""

    id: str
    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    model: str
    prompt: str
    seconds: str | None = None
    size: str | None = None
    error: VideoError | None = None
    remixed_from_video_id: str | None = None
    metrics: dict[str, Any] | None = None


class VideoList(BaseModel):
    """A page of them."""

    object: Literal["list"] = "list"
    data: list[VideoObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class VideoDeleted(BaseModel):
    """Answer to a deletion."""

    id: Name
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True
