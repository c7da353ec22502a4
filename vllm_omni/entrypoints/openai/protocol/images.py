# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/images/generations` and `/v1/images/edits`: OpenAI's, and what diffusion adds."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from vllm_omni.entrypoints.openai.protocol.diffusion import (
    DiffusionRequest,
    LongText,
    Name,
    Prompt,
    Scale,
    Side,
    at_fault,
    check_sides,
    check_size,
    contradiction,
)
from vllm_omni.media.image_encode import check_background, image_format

MAX_IMAGES = 10
"""`n`, as at OpenAI."""
MAX_PARTIAL_IMAGES = 3
MAX_LAYERS = 32


class ImageRequest(DiffusionRequest):
    """What making and editing have in common."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "style": "this model has no styles; say it in `prompt`",
        "input_fidelity": "this model has none; `strength` says how much of a picture changes",
    }
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("quality", "moderation")

    prompt: Prompt = Field(description="What to paint, or what to change.")
    n: int = Field(default=1, ge=1, le=MAX_IMAGES, description="How many pictures.")
    num_outputs_per_prompt: int | None = Field(
        default=None, ge=1, le=MAX_IMAGES, description="Same as `n`."
    )
    size: str | None = Field(
        default=None,
        description="WIDTHxHEIGHT, or auto (the default) for that of the picture that is changed, "
        "else the model's own.",
    )
    width: Side | None = Field(default=None, description="With `height`, instead of `size`.")
    height: Side | None = Field(default=None, description="With `width`, instead of `size`.")
    response_format: Literal["b64_json", "url"] = Field(
        default="b64_json", description="Where the picture is put; `url` is a data URL."
    )
    output_format: str = Field(default="png", description="png, jpeg or webp.")
    output_compression: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Quality of jpeg and webp in percent; for png, 100 is made fastest.",
    )
    background: Literal["auto", "opaque", "transparent"] = Field(
        default="auto", description="`opaque` puts transparent pictures on white."
    )
    stream: bool = Field(default=False, description="Answer with events.")
    partial_images: int = Field(
        default=0, ge=0, le=MAX_PARTIAL_IMAGES, description="Previews in a stream."
    )
    quality: Name | None = Field(default=None, description="As OpenAI's; without effect.")
    moderation: Name | None = Field(default=None, description="As OpenAI's; without effect.")
    safety_identifier: Name | None = Field(default=None, description="Same as `user`.")
    cfg_scale: Scale | None = Field(default=None, description="Same as `true_cfg_scale`.")
    layers: int | None = Field(
        default=None, ge=1, le=MAX_LAYERS, description="Of a model that paints in layers."
    )
    resolution: int | None = Field(
        default=None, ge=16, le=16_384, description="Side that a layered model works at."
    )
    system_prompt: LongText | None = Field(default=None, description="Of a model that has one.")
    use_system_prompt: Name | None = Field(default=None, description="Which built-in one.")
    bot_task: Name | None = Field(default=None, description="What a model does first (think).")
    sys_type: Name | None = Field(default=None, description="Same as `use_system_prompt`.")

    @field_validator("size")
    @classmethod
    def _check_size(cls, size: str | None) -> str | None:
        return check_size(size)

    @field_validator("output_format")
    @classmethod
    def _check_format(cls, name: str) -> str:
        return image_format(name)

    @model_validator(mode="after")
    def _check_together(self) -> "ImageRequest":
        check_background(self.background, self.output_format)
        check_sides(self.width, self.height, self.size)
        self._check_same("num_outputs_per_prompt", "n")
        self._check_same("cfg_scale", "true_cfg_scale")
        self._check_same("sys_type", "use_system_prompt")
        if self.partial_images and not self.stream:
            raise at_fault("partial_images", "needs stream")
        return self

    def _check_same(self, name: str, other: str) -> None:
        """See that two names of one thing say the same."""
        said = {each: getattr(self, each) for each in (name, other)}
        given = self.model_fields_set.issuperset(said) and None not in said.values()
        if given and said[name] != said[other]:
            raise contradiction(name, other)

    @property
    def count(self) -> int:
        """How many pictures."""
        return self.num_outputs_per_prompt or self.n

    def dimensions(self) -> tuple[int, int] | None:
        """The (width, height) that was asked for, if one was."""
        if self.width is not None and self.height is not None:
            return self.width, self.height
        if self.size is None:
            return None
        width, _, height = self.size.partition("x")
        return int(width), int(height)


class ImageGenerationRequest(ImageRequest):
    """Body of `/v1/images/generations`."""


class ImageEditRequest(ImageRequest):
    """Fields of `/v1/images/edits` beside its pictures."""

    url: Annotated[list[str], Field(max_length=16)] = Field(
        default_factory=list, description="URLs (http, https or data) of further input pictures."
    )


class ImageData(BaseModel):
    """One picture."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class TokenDetails(BaseModel):
    """OpenAI's split of input tokens; a diffusion model counts none."""

    image_tokens: int = 0
    text_tokens: int = 0


class ImageUsage(BaseModel):
    """OpenAI's usage."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: TokenDetails = Field(default_factory=TokenDetails)


class ImageResponse(BaseModel):
    """Answer of both routes."""

    created: int
    data: list[ImageData]
    background: str
    output_format: str
    quality: str | None = None
    size: str
    usage: ImageUsage = Field(default_factory=ImageUsage)
    cot_output: str | None = None
    metrics: dict[str, Any] | None = None
