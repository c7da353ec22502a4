# SPDX-License-Identifier: Apache-2.0
"""The size of what is made: what a request leaves open, and never more pixels than it may have.

A pipeline that is given no size makes its own, whatever picture it changes and whatever a server
allows. So an open size is chosen here: that of the picture to change, else the pipeline's own, made
smaller if it has too many pixels. Pipelines that choose by the picture themselves keep doing so.
"""

import math
from collections.abc import Mapping

import torch
from diffusers import DiffusionPipeline

from vllm_omni.config.diffusers import call_parameters, modality_of
from vllm_omni.diffusion.programs.diffusers.kit import registered
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest, media_name

OWN_CHOICE = (
    *("QwenImageEdit", "QwenImage21", "Flux2", "GlmImage", "ZImageOmni"),
    *("BriaFiboEdit", "JoyImageEdit"),
)
"""How the names of pipelines begin that choose a size by the picture, if they are given none."""
OWN_AREA = 1 << 20
"""Pixels that they choose at most, but for rounding."""
SEVERAL = frozenset(
    {
        "BriaFiboEditPipeline",
        "BriaFibo2Pipeline",
        "Flux2KleinKVPipeline",
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "GlmImagePipeline",
        "JoyImageEditPlusPipeline",
        "OmniGenPipeline",
        "QwenImage21Pipeline",
        "QwenImageEditPlusPipeline",
        "ZImageOmniPipeline",
    }
)
"""Pipelines that make one picture of several. To all others several are a batch."""

Size = tuple[int, int]
"""Width and height in pixels."""


def check_one_picture(pipeline: DiffusionPipeline, media: Mapping[str, int]) -> None:
    """Refuse several pictures for a pipeline that changes one.

    Raises:
        OmniClientError: Names `image`.
    """
    count, name = media.get("image", 0), type(pipeline).__name__
    if count > 1 and name not in SEVERAL:
        raise OmniClientError(f"`image`: {name} takes one picture, not {count}", param="image")


def size_arguments(
    pipeline: DiffusionPipeline,
    request: GenerationRequest,
    media: Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """Arguments that say how large the result is to be, beside the request's own.

    Raises:
        OmniClientError: An extra argument asks for more pixels than there may be.
    """
    known, params = call_parameters(type(pipeline)), request.params
    if "height" not in known or "width" not in known:
        return {}
    area = params.extra_args.get("max_area")
    most = params.max_pixels
    if most is not None and isinstance(area, int | float) and area > most:
        raise OmniClientError(
            f"`extra_args.max_area`: should be at most {most} pixels", param="extra_args.max_area"
        )
    scales = (
        "max_area" in known and area is None
    )  # FLUX.1 Kontext: `height` and `width` are a shape
    if params.width is not None or params.height is not None:
        asked = (params.width or 0) * (params.height or 0)
        return {"max_area": asked} if scales and asked else {}
    chosen = _chosen(pipeline, request, media)
    if chosen is None:
        return {}
    found = {"width": chosen[0], "height": chosen[1]}
    if scales and most is not None:
        found["max_area"] = min(most, known["max_area"].default)
    return found


def _chosen(
    pipeline: DiffusionPipeline, request: GenerationRequest, media: Mapping[str, torch.Tensor]
) -> Size | None:
    """The size to ask for; None to leave it to the pipeline."""
    most = request.params.max_pixels
    name = type(pipeline).__name__
    if "image" in request.media and modality_of(type(pipeline)) == "image":
        height, width = media[media_name("image", 0)].shape[:2]
        if not name.startswith(OWN_CHOICE):
            return fitted((width, height), most, _multiple(pipeline))
        if most is None or most >= OWN_AREA:
            return None
        scale = math.sqrt(OWN_AREA / (width * height))
        return fitted((round(width * scale), round(height * scale)), most, _multiple(pipeline))
    own = default_size(pipeline)
    if own is None or most is None or own[0] * own[1] <= most:
        return None
    return fitted(own, most, _multiple(pipeline))


def default_size(pipeline: DiffusionPipeline) -> Size | None:
    """What a pipeline makes if it is given no size, as far as can be told."""
    known = call_parameters(type(pipeline))
    width, height = known["width"].default, known["height"].default
    if isinstance(width, int) and isinstance(height, int):
        return width, height
    own = vars(pipeline)
    factor, sample = own.get("vae_scale_factor"), own.get("default_sample_size")
    unet = registered(pipeline).get("unet")
    if sample is None and unet is not None:
        sample = unet.config.get("sample_size")
    if isinstance(factor, int) and isinstance(sample, int):
        return sample * factor, sample * factor
    return None


def fitted(size: Size, most: int | None, multiple: int) -> Size:
    """The same shape, as far as it can be had.

    Args:
        size: What is wanted.
        most: Most pixels.
        multiple: What each side has to be a multiple of.
    """
    width, height = size
    scale = 1.0 if most is None else min(1.0, math.sqrt(most / (width * height)))
    sides = (max(multiple, int(side * scale) // multiple * multiple) for side in size)
    width, height = sides
    if most is not None and width * height > most:  # very long: a side is as short as can be
        longest = max(multiple, most // min(width, height) // multiple * multiple)
        width, height = min(width, longest), min(height, longest)
    return width, height


def _multiple(pipeline: DiffusionPipeline) -> int:
    """What sides are multiples of: the pixels of two latents, as models take two at a time."""
    factor = vars(pipeline).get("vae_scale_factor")
    return 2 * factor if isinstance(factor, int) else 16
