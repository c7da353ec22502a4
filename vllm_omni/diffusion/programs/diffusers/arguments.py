# SPDX-License-Identifier: Apache-2.0
"""From what a request says to the arguments of a pipeline's `__call__`."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from vllm_omni.config.diffusers import call_parameters
from vllm_omni.config.diffusers_tasks import MEDIA, media_parameter
from vllm_omni.diffusion.programs.diffusers.extra import extra_argument
from vllm_omni.diffusion.programs.diffusers.guidance import guide
from vllm_omni.diffusion.programs.diffusers.kit import registered
from vllm_omni.diffusion.programs.diffusers.schedule import check_strength
from vllm_omni.diffusion.programs.diffusers.sizes import size_arguments
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest, media_name

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "height": ("height",),
    "width": ("width",),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale",),
    "guidance_scale_2": ("guidance_scale_2",),
    "true_cfg_scale": ("true_cfg_scale",),
    "num_outputs_per_prompt": (
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "num_waveforms_per_prompt",
    ),
    "num_frames": ("num_frames", "num_frames_per_chunk", "frames", "segment_frame_length"),
    "fps": ("frame_rate", "fps"),
    "strength": ("strength",),
    "sigmas": ("sigmas",),
    "layers": ("layers",),
    "resolution": ("resolution",),
    "max_sequence_length": ("max_sequence_length",),
    "audio_length": (
        "audio_end_in_s",
        "audio_length_in_s",
        "audio_duration",
        "audio_duration_s",
        "duration",
    ),
    "audio_start": ("audio_start_in_s",),
}
"""Fields of `OmniDiffusionSamplingParams` -> parameters that take them, by preference."""

TAKEN = {parameter for parameters in PARAMETERS.values() for parameter in parameters}
"""Parameters that these fields stand for."""

_END = "audio_end_in_s"
"""The parameter that says when the sound ends, not how long it is."""
OPTIONAL = frozenset({"fps"})
"""Fields that mean something without a parameter too: how fast the frames are played."""


def call_arguments(
    pipeline: DiffusionPipeline,
    request: GenerationRequest,
    media: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """Keyword arguments of one call.

    Args:
        pipeline: Whose `__call__`.
        request: What is asked for; its seed is set.
        media: By `media_name`.
        device: Where the models are.

    Raises:
        OmniClientError: The pipeline has no such parameter; names it.
    """
    cls = type(pipeline)
    known = call_parameters(cls)
    arguments: dict[str, Any] = {}
    for name, value in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if value is not None:
            arguments[_known(cls, name, (name,))] = value
    if request.prompt is None and "prompt" in known:
        raise OmniClientError("`prompt` is missing", param="prompt")
    given = request.params.given()
    for name, parameters in PARAMETERS.items():
        if name in given and (name not in OPTIONAL or _takes(known, parameters)):
            arguments[_known(cls, name, parameters)] = given[name]
    for name, value in request.params.extra_args.items():
        arguments[name] = extra_argument(cls, name, value, TAKEN)
    guide(pipeline, arguments)
    if request.params.audio_length is not None and _END in arguments:
        arguments[_END] += request.params.audio_start or 0.0
    check_strength(pipeline, arguments, steps_of(cls, arguments))
    mode = _mode(pipeline)
    if request.params.transparent and mode != "RGBA":
        raise OmniClientError(
            f"`background`: {cls.__name__} makes opaque pictures", param="background"
        )
    arguments |= size_arguments(pipeline, request, media)
    for medium, count in request.media.items():
        parameter = media_parameter(cls, medium)
        assert parameter is not None  # Kit.choose has seen to it
        tensors = [media[media_name(medium, i)] for i in range(count)]
        pieces = [as_input(medium, tensor, mode) for tensor in tensors]
        arguments[parameter] = pieces[0] if count == 1 else pieces
    if request.sample_rate is not None:
        for name in ("sample_rate", "initial_audio_sampling_rate"):
            if name in known:
                arguments[name] = request.sample_rate
    if "generator" in known:
        arguments["generator"] = generator(request, device)
    if "output_type" in known:
        arguments["output_type"] = "latent" if request.params.output_type == "latent" else "pt"
    return arguments


def steps_of(cls: type[DiffusionPipeline], arguments: Mapping[str, Any]) -> int | None:
    """Denoising steps that a call asks for; None if its pipeline does not count them."""
    if sigmas := arguments.get("sigmas"):
        return len(sigmas)
    parameter = call_parameters(cls).get("num_inference_steps")
    return arguments.get("num_inference_steps", parameter.default) if parameter else None


def generator(request: GenerationRequest, device: torch.device) -> torch.Generator:
    """The request's own source of random numbers.

    Raises:
        OmniClientError: There is no such device here.
    """
    name = request.params.generator_device or "cpu"
    known = sorted({"cpu", device.type})
    if name not in known:
        raise OmniClientError(
            f"`generator_device`: should be {' or '.join(known)}, not {name!r}",
            param="generator_device",
        )
    assert request.params.seed is not None
    return torch.Generator(device if name == device.type else "cpu").manual_seed(
        request.params.seed
    )


def as_input(medium: str, piece: torch.Tensor, mode: str) -> Any:
    """A piece as pipelines take it: a picture, a list of pictures, or samples.

    Args:
        medium: Which.
        piece: See `media_name`.
        mode: Pillow's, of pictures that are no masks.
    """
    if medium == "audio":
        return piece
    if medium == "mask_video":
        return [_picture(frame) for frame in piece]
    if piece.ndim == 4:
        return [_picture(frame, mode) for frame in piece]
    return _picture(piece, None if medium == "mask_image" else mode)


def _picture(pixels: torch.Tensor, mode: str | None = None) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(pixels.numpy()))
    return picture if mode in (None, picture.mode) else picture.convert(mode)


def _mode(pipeline: DiffusionPipeline) -> str:
    """Pillow's mode of the pictures that its VAE encodes; transparency is beyond most of them."""
    vae = registered(pipeline).get("vae")
    config = {} if vae is None else vae.config
    channels = config.get("input_channels", config.get("in_channels"))
    return "RGBA" if channels == 4 else "RGB"


def _takes(known: Mapping[str, Any], parameters: tuple[str, ...]) -> bool:
    return any(parameter in known for parameter in parameters)


def _known(cls: type[DiffusionPipeline], field: str, parameters: tuple[str, ...]) -> str:
    known = call_parameters(cls)
    for parameter in parameters:
        if parameter in known:
            return parameter
    raise OmniClientError(f"`{field}`: {cls.__name__} takes none", param=field)


def field_named_in(message: str) -> str | None:
    """The request's field that a pipeline's complaint is about: the first one that it names."""
    fields = {parameter: field for field, names in PARAMETERS.items() for parameter in names}
    fields |= {parameter: medium for medium, names in MEDIA.items() for parameter in names}
    fields |= {"prompt": "prompt", "negative_prompt": "negative_prompt"}
    named = [fields[word] for word in re.findall(r"\w+", message.lower()) if word in fields]
    if "strength" in named:  # named as the reason why there are no `num_inference_steps` left
        return "strength"
    return next(iter(named), None)
