# SPDX-License-Identifier: Apache-2.0
"""How large the result is where a request leaves it open, and what a pipeline refuses at once."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import FrozenDict

from vllm_omni.diffusion.programs.diffusers.arguments import call_arguments, field_named_in
from vllm_omni.diffusion.programs.diffusers.sizes import check_one_picture, fitted, size_arguments
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest, OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]
CPU = torch.device("cpu")


def pipeline(name: str) -> DiffusionPipeline:
    """A pipeline without models, of latents of eight pixels."""
    made = object.__new__(getattr(diffusers, name))
    vars(made).update(_internal_dict=FrozenDict(), vae_scale_factor=8, default_sample_size=128)
    return made


def asked(picture: tuple[int, int] | None = None, **params: Any) -> tuple[Any, ...]:
    """A request and its media; the picture's width and height."""
    media, tensors = {}, {}
    if picture is not None:
        width, height = picture
        media = {"image": 1}
        tensors = {"image.0": torch.zeros(height, width, 3, dtype=torch.uint8)}
    own = OmniDiffusionSamplingParams(seed=0, **params)
    return GenerationRequest(prompt="a cat", params=own, media=media), tensors


def sides(width: int, height: int, **more: int) -> dict[str, int]:
    return {"width": width, "height": height, **more}


WIDE = (750, 500)


@pytest.mark.parametrize(
    ("name", "request_", "size"),
    [
        ("FluxPipeline", asked(), {}),
        ("FluxPipeline", asked(max_pixels=1 << 20), {}),
        ("FluxPipeline", asked(max_pixels=512 * 512), sides(512, 512)),
        ("FluxPipeline", asked(width=2048, height=64, max_pixels=64), {}),
        ("WanPipeline", asked(max_pixels=240 * 416), sides(416, 240)),
        ("FluxImg2ImgPipeline", asked(WIDE), sides(736, 496)),
        ("FluxImg2ImgPipeline", asked(WIDE, max_pixels=150 * 100), sides(144, 96)),
        ("FluxImg2ImgPipeline", asked(WIDE, width=64, height=64), {}),
        ("FluxInpaintPipeline", asked((8, 8)), sides(16, 16)),
        ("StableDiffusionImg2ImgPipeline", asked(WIDE), {}),  # has its picture's size anyway
        ("QwenImageEditPipeline", asked(WIDE), {}),
        ("QwenImageEditPipeline", asked(WIDE, max_pixels=1 << 20), {}),
        ("QwenImageEditPipeline", asked(WIDE, max_pixels=1 << 18), sides(624, 416)),
        ("FluxKontextPipeline", asked(WIDE), sides(736, 496)),
        ("FluxKontextPipeline", asked(WIDE, max_pixels=64**2), sides(64, 48, max_area=64**2)),
        ("FluxKontextPipeline", asked(width=64, height=48), {"max_area": 64 * 48}),
        ("FluxKontextPipeline", asked(width=64, height=48, extra_args={"max_area": 99}), {}),
        ("WanImageToVideoPipeline", asked(WIDE), {}),
    ],
)
def test_a_size_that_was_left_open(name: str, request_: Any, size: dict[str, int]) -> None:
    assert size_arguments(pipeline(name), *request_) == size


def test_the_bound_holds_for_an_area_too() -> None:
    request, media = asked(max_pixels=99, extra_args={"max_area": 100})
    with pytest.raises(OmniClientError) as refused:
        size_arguments(pipeline("FluxKontextPipeline"), request, media)
    assert refused.value.param == "extra_args.max_area"


@pytest.mark.parametrize(
    ("size", "most", "found"),
    [((100, 30), None, (96, 16)), ((10_000, 10), 1600, (96, 16)), ((16, 16), 1, (16, 16))],
)
def test_fitting(size: tuple[int, int], most: int | None, found: tuple[int, int]) -> None:
    assert fitted(size, most, 16) == found


def test_several_pictures_are_refused_by_count() -> None:
    with pytest.raises(OmniClientError, match=r"`image`: .* takes one picture, not 3") as refused:
        check_one_picture(pipeline("FluxImg2ImgPipeline"), {"image": 3})
    assert refused.value.param == "image"
    check_one_picture(pipeline("QwenImageEditPlusPipeline"), {"image": 3})
    check_one_picture(pipeline("FluxImg2ImgPipeline"), {"image": 1, "mask_image": 1})


def test_opaque_pictures_are_not_transparent() -> None:
    with pytest.raises(OmniClientError, match="opaque") as refused:
        call_arguments(pipeline("FluxPipeline"), *asked(transparent=True), CPU)
    assert refused.value.param == "background"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (
            "After adjusting the num_inference_steps by strength parameter: 0.0, the number of "
            "pipeline steps is 0 which is < 1 and not appropriate for this pipeline.",
            "strength",
        ),
        ("`height` and `width` have to be divisible by 16", "height"),
        ("The value of strength should in [0.0, 1.0] but is 2", "strength"),
        ("the guardrail", None),
    ],
)
def test_what_a_pipeline_complains_of(message: str, field: str | None) -> None:
    assert field_named_in(message) == field
