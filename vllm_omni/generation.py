# SPDX-License-Identifier: Apache-2.0
"""What a caller asks of a diffusion stage, and how it travels to one.

`OmniDiffusionSamplingParams` is what callers fill in. A `GenerationRequest` is that together with
the prompt, encodable by msgspec; media go beside it as tensors, named by `media_name`.
"""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from vllm_omni.errors import OmniClientError

MAX_SIDE = 1 << 15
"""Most pixels along one side, whatever the pipeline."""
MAX_STEPS = 1000
MAX_FRAMES = 10_000
MAX_OUTPUTS = 64
MAX_SEED = 2**63 - 1
MAX_PROMPT_CHARACTERS = 1 << 16

Side = Annotated[int, Meta(ge=8, le=MAX_SIDE)]
Scale = Annotated[float, Meta(ge=-1e3, le=1e3)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sigma = Annotated[float, Meta(ge=0, le=1e6)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]

OutputType = Literal["pil", "pt", "latent"]


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter for one request.

    Attributes:
        name: What it is called.
        path: Folder, file or hub name; None for one that the server knows by its name.
        scale: Strength.
    """

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    path: str | None = None
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0


class OmniDiffusionSamplingParams(msgspec.Struct, kw_only=True):
    """What a request says about how its pictures, video or sound are made.

    Everything that is None is left to the stage's defaults, then to the pipeline's own.

    Attributes:
        height: Pixels.
        width: Pixels.
        num_inference_steps: Denoising steps.
        guidance_scale: Guidance, classifier-free or distilled, as the pipeline has it.
        guidance_scale_2: Of the low-noise expert, where there are two.
        true_cfg_scale: Classifier-free guidance of models whose `guidance_scale` is distilled.
        num_outputs_per_prompt: Pictures, videos or sounds per request.
        seed: Of every random number of the request; a random one if None.
        generator_device: Where random numbers are drawn (`cpu`, or the stage's own device).
        num_frames: Of a video.
        fps: Frames per second of a video.
        strength: How far an input picture is changed, 0 to 1.
        sigmas: Noise levels instead of a number of steps, each lower than the one before.
        flow_shift: Shift of a flow-matching schedule, instead of the deployment's.
        boundary_ratio: Where the low-noise expert takes over, instead of the deployment's.
        layers: Pictures that a layered pipeline makes.
        resolution: Bucket that a pipeline chooses its size from.
        max_pixels: Most pixels of a picture or frame whose size is left open.
        transparent: Only a pipeline whose pictures have transparency will do.
        max_sequence_length: Tokens of the prompt.
        audio_length: Seconds of sound.
        audio_start: Where the sound starts in the piece, in seconds.
        lora: An adapter.
        previews: Pictures to send while denoising.
        progress: Say after every step how far the request is.
        output_type: `pil` for what is shown, `pt` for float tensors, `latent` for undecoded ones.
        return_trajectory: Send the latents after every step.
        extra_args: Further arguments of the pipeline's `__call__` by name (numbers, strings, lists
            of them).
    """

    height: Side | None = None
    width: Side | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: Scale | None = None
    guidance_scale_2: Scale | None = None
    true_cfg_scale: Scale | None = None
    num_outputs_per_prompt: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)] = 1
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    generator_device: str | None = None
    num_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)] | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    strength: Share | None = None
    sigmas: Annotated[list[Sigma], Meta(min_length=1, max_length=MAX_STEPS)] | None = None
    flow_shift: Annotated[float, Meta(gt=0, le=1000)] | None = None
    boundary_ratio: Share | None = None
    layers: Annotated[int, Meta(ge=1, le=64)] | None = None
    resolution: Annotated[int, Meta(ge=8, le=MAX_SIDE)] | None = None
    max_pixels: Annotated[int, Meta(ge=1)] | None = None
    transparent: bool = False
    max_sequence_length: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    audio_length: Seconds | None = None
    audio_start: Annotated[float, Meta(ge=0, le=3600)] | None = None
    lora: Lora | None = None
    previews: Annotated[int, Meta(ge=0, le=64)] = 0
    progress: bool = False
    output_type: OutputType = "pil"
    return_trajectory: bool = False
    extra_args: dict[str, Any] = {}

    def clone(self) -> "OmniDiffusionSamplingParams":
        """An independent copy."""
        return msgspec.structs.replace(self, extra_args=dict(self.extra_args))

    def given(self) -> dict[str, Any]:
        """Fields that differ from saying nothing, as plain values."""
        return {
            name: value
            for name, value in msgspec.to_builtins(self).items()
            if value != _UNSAID[name]
        }


_UNSAID: Mapping[str, Any] = msgspec.to_builtins(OmniDiffusionSamplingParams())
PARAMETERS = tuple(OmniDiffusionSamplingParams.__struct_fields__)


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a diffusion stage, but for its media.

    Attributes:
        prompt: What to make; None where the pipeline takes none.
        negative_prompt: What to avoid.
        params: How to make it; `seed` is set.
        media: How many pieces there are of each medium: `{"image": 2, "mask_image": 1}`.
        sample_rate: Hz, of sounds among them.
    """

    prompt: Text | None = None
    negative_prompt: Text | None = None
    params: OmniDiffusionSamplingParams = msgspec.field(default_factory=OmniDiffusionSamplingParams)
    media: dict[str, int] = {}
    sample_rate: int | None = None


def media_name(medium: str, index: int) -> str:
    """Name of the tensor of one piece: pictures are uint8 [h, w, channels], masks uint8 [h, w],
    videos uint8 [frames, h, w, 3], sounds float32 [channels, samples]."""
    return f"{medium}.{index}"


def checked_params(given: Mapping[str, Any], field: str) -> OmniDiffusionSamplingParams:
    """Parameters from plain values.

    Args:
        given: By name.
        field: Name of the request field that holds them, for errors; may be empty.

    Raises:
        OmniClientError: Names the parameter at fault.
    """
    prefix = f"{field}." if field else ""
    for name, value in given.items():
        if name not in PARAMETERS:
            raise OmniClientError(f"unknown parameter `{prefix}{name}`", param=f"{prefix}{name}")
        _check_finite(value, f"{prefix}{name}")
    extra = given.get("extra_args")
    for name, value in extra.items() if isinstance(extra, Mapping) else ():
        _check_plain(value, f"{prefix}extra_args.{name}")
    try:
        params = msgspec.convert(dict(given), OmniDiffusionSamplingParams)
    except msgspec.ValidationError as error:
        message, path = _located(str(error))
        raise OmniClientError(f"`{prefix}{path}`: {message}", param=f"{prefix}{path}") from error
    _check_schedule(params, prefix)
    return params


def _check_schedule(params: OmniDiffusionSamplingParams, prefix: str) -> None:
    """See that noise only falls."""
    if params.sigmas is not None:
        _check_falling(params.sigmas, f"{prefix}sigmas")
    for name, value in params.extra_args.items():
        if name.endswith(("sigmas", "timesteps")) and isinstance(value, list | tuple):
            _check_falling(value, f"{prefix}extra_args.{name}")


def _check_falling(levels: list[Any] | tuple[Any, ...], field: str) -> None:
    """Refuse what is no schedule of noise.

    Args:
        levels: Of noise, or steps of training.
        field: What to blame.

    Raises:
        OmniClientError: There are too many, or they are negative or do not fall.
    """
    numbers = all(isinstance(level, int | float) for level in levels)
    if not numbers or not 1 <= len(levels) <= MAX_STEPS:
        reason = f"should be a list of 1 to {MAX_STEPS} numbers"
    elif any(not 0 <= level <= MAX_LEVEL for level in levels):
        reason = f"should have numbers from 0 to {MAX_LEVEL}"
    elif any(later >= earlier for earlier, later in pairwise(levels)):
        reason = "should fall from each number to the next"
    else:
        return
    raise OmniClientError(f"`{field}`: {reason}", param=field)


MAX_LEVEL = 10**6
"""Of noise, and of the number of a step of training."""
MAX_DEPTH = 8
MAX_ITEMS = 10_000


def _check_plain(value: Any, field: str, depth: int = 0) -> None:
    """See that a value can be sent, and is no burden."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OmniClientError(f"`{field}`: is too large a number", param=field)
    if isinstance(value, str) and len(value) > MAX_PROMPT_CHARACTERS:
        raise OmniClientError(
            f"`{field}`: at most {MAX_PROMPT_CHARACTERS} characters are allowed", param=field
        )
    _check_number(value, field)
    if not isinstance(value, list | tuple | Mapping):
        return
    if depth == MAX_DEPTH or len(value) > MAX_ITEMS:
        raise OmniClientError(
            f"`{field}`: at most {MAX_DEPTH} levels of {MAX_ITEMS} items are allowed", param=field
        )
    for each in value.values() if isinstance(value, Mapping) else value:
        _check_plain(each, field, depth + 1)


def _check_finite(value: Any, field: str) -> None:
    for each in value if isinstance(value, list | tuple) else (value,):
        _check_number(each, field)


def _check_number(value: Any, field: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise OmniClientError(f"`{field}`: should be a finite number", param=field)


def _located(message: str) -> tuple[str, str]:
    """msgspec's message, and the path in it: `$.lora.scale` -> `lora.scale`."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message, re.DOTALL)
    return (found[1], found[2]) if found else (message, "")
