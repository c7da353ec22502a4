# SPDX-License-Identifier: Apache-2.0
"""What every request for pictures, videos and sounds may say about how they are made."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import regex as re
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_omni.entrypoints.openai.protocol.content import check_text
from vllm_omni.errors import OmniClientError

MAX_PROMPT = 1 << 16
"""Characters of a prompt; what the model's own tokenizer takes is less."""
MAX_NAME = 256
MIN_SIDE, MAX_SIDE = 16, 16_384
MAX_STEPS = 1000
MAX_EXTRA_PARAMS = 256

_SIZE = re.compile(r"\s*(\d{1,6})\s*[xX×*]\s*(\d{1,6})\s*")

Prompt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT)]
LongText = Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
Side = Annotated[int, Field(ge=MIN_SIDE, le=MAX_SIDE)]
Scale = Annotated[float, Field(ge=0, le=1000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class LoraRef(BaseModel):
    """A LoRA adapter for one request."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)] = Field(
        description="Name of an adapter that is loaded, or what to call the one at `path`."
    )
    path: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        default=None, description="Its folder or file on the server."
    )
    scale: float = Field(default=1.0, ge=-100, le=100, description="Its strength.")
    int_id: int | None = Field(default=None, ge=1, lt=2**31, description="Its number.")

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if "\0" in name or ".." in name.split("/") or name.startswith("/"):
            raise PydanticCustomError("lora_name", "should be a name and no path out of a folder")
        return name


class DiffusionRequest(BaseModel):
    """Fields that requests for pictures, videos and sounds share. Unset: the model's default.

    What is no field may still be an argument of the model's own pipeline; see `unknown`.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Fields of OpenAI's that could have no effect here -> what is wrong with them."""
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()
    """Fields that are taken, for clients send them as a matter of course, and only logged."""

    model: Name | None = Field(default=None, description="The model's served name.")
    negative_prompt: LongText | None = Field(default=None, description="What should not be there.")
    num_inference_steps: int | None = Field(
        default=None, ge=1, le=MAX_STEPS, description="Denoising steps."
    )
    guidance_scale: Scale | None = Field(default=None, description="How closely to follow.")
    guidance_scale_2: Scale | None = Field(
        default=None, description="That of the second, low-noise, transformer."
    )
    true_cfg_scale: Scale | None = Field(
        default=None, description="Classifier-free guidance of models that were distilled."
    )
    seed: Seed | None = Field(default=None, description="The same seed, the same result.")
    generator_device: str | None = Field(
        default=None,
        pattern=r"^(cpu|cuda|npu|xpu|musa|mps)(:\d{1,3})?$",
        description="Where random numbers are drawn.",
    )
    flow_shift: float | None = Field(
        default=None, gt=0, le=1000, description="Shift of the flow-matching schedule."
    )
    boundary_ratio: Fraction | None = Field(
        default=None, description="Where the low-noise transformer takes over."
    )
    strength: Fraction | None = Field(default=None, description="How much of an input changes.")
    lora: LoraRef | None = Field(default=None, description="An adapter for this request.")
    vae_use_slicing: bool | None = Field(default=None, description="Decode one by one.")
    vae_use_tiling: bool | None = Field(default=None, description="Decode in tiles.")
    extra_params: dict[str, Any] | None = Field(
        default=None,
        max_length=MAX_EXTRA_PARAMS,
        description="Further arguments of the model's own pipeline.",
    )
    extra_args: dict[str, Any] | None = Field(
        default=None, max_length=MAX_EXTRA_PARAMS, description="Same as `extra_params`."
    )
    extra_body: dict[str, Any] | None = Field(
        default=None,
        max_length=MAX_EXTRA_PARAMS,
        description="Further fields, as if they were given beside it.",
    )
    return_stage_metrics: bool = Field(
        default=False, description="Answer with the timing of each stage in `metrics`."
    )
    user: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_text(data)
        inner = data.get("extra_body")
        if isinstance(inner, dict):
            data = joined(data, inner, "extra_body")
            data["extra_body"] = None
        for name, reason in cls.REFUSED.items():
            if data.get(name) is not None:
                raise at_fault(name, reason)
        return data

    def unknown(self) -> dict[str, Any]:
        """What was given and is no field of this request."""
        return {n: v for n, v in (self.model_extra or {}).items() if v is not None}

    def extra(self) -> dict[str, Any]:
        """Arguments for the model's own pipeline.

        Raises:
            OmniClientError: One was given twice, and differently.
        """
        asked = joined(dict(self.extra_params or {}), self.extra_args or {}, "extra_args")
        return joined(asked, self.unknown(), "")


def joined(first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both together.

    Args:
        first: By name.
        second: By name.
        where: The field that `second` came in, or nothing.

    Raises:
        OmniClientError: They say something different of the same.
    """
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            here = f"{where}.{name}" if where else name
            there = name if where == "extra_body" else f"extra_params.{name}"
            raise contradiction(here, there)
    return {**first, **second}


def contradiction(param: str, other: str) -> OmniClientError:
    """What is raised about two fields that say something different of the same."""
    return at_fault(param, f"contradicts `{other}`; give one of them")


def check_sides(width: int | None, height: int | None, size: str | None) -> None:
    """See that a size that was given in two ways is the same one.

    Raises:
        OmniClientError: It is not, or a side is missing; names the fields.
    """
    if (width is None) != (height is None):
        missing = "width" if width is None else "height"
        raise at_fault(missing, "should be given, for the other side is")
    if width is not None and size is not None and size != f"{width}x{height}":
        raise contradiction("size", "width` and `height")


def at_fault(param: str, reason: str) -> OmniClientError:
    """What a validator of the whole body raises about one field."""
    return OmniClientError(f"{param}: {reason}", param=param)


def parse_size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT as two numbers.

    Raises:
        PydanticCustomError: It is no size, or beyond what any model makes.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise PydanticCustomError(
            "size", "should be WIDTHxHEIGHT in pixels, such as 1024x1024, or auto"
        )
    width, height = int(match[1]), int(match[2])
    if not (min(width, height) >= MIN_SIDE and max(width, height) <= MAX_SIDE):
        raise PydanticCustomError("size", f"should have sides of {MIN_SIDE} to {MAX_SIDE} pixels")
    return width, height


def check_size(text: str | None) -> str | None:
    """For validators: a size as it is, if it is one; None for `auto`."""
    if text is None or text.strip().lower() in ("auto", ""):
        return None
    width, height = parse_size(text)
    return f"{width}x{height}"
