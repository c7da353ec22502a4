# SPDX-License-Identifier: Apache-2.0
"""What a request says about guidance takes effect, or is refused by name (rows A-34, A-47)."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.configuration_utils import FrozenDict

from vllm_omni.diffusion.programs.diffusers.arguments import call_arguments
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest, OmniDiffusionSamplingParams

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]
CPU = torch.device("cpu")


def pipeline(name: str, told: bool) -> DiffusionPipeline:
    """A pipeline whose transformer has no weights.

    Args:
        name: Of its class.
        told: The transformer is told `guidance_scale`.
    """
    transformer = object.__new__(FluxTransformer2DModel)
    vars(transformer)["_internal_dict"] = FrozenDict(guidance_embeds=told)
    made = object.__new__(getattr(diffusers, name))
    config = FrozenDict(transformer=("diffusers", "FluxTransformer2DModel"))
    vars(made).update(_internal_dict=config, transformer=transformer)
    return made


def arguments(made: DiffusionPipeline, negative: str | None = None, **params: Any) -> Any:
    request = GenerationRequest(
        prompt="a cat",
        negative_prompt=negative,
        params=OmniDiffusionSamplingParams(seed=0, **params),
    )
    return call_arguments(made, request, {}, CPU)


@pytest.mark.parametrize(
    ("scale", "given", "avoided"),
    [(4.0, None, " "), (4.0, "rain", "rain"), (None, "rain", "rain"), (1.0, None, None)],
)
def test_true_cfg_takes_effect(scale: float | None, given: str | None, avoided: str | None) -> None:
    made = arguments(pipeline("QwenImagePipeline", False), given, true_cfg_scale=scale)
    assert made.get("negative_prompt") == avoided
    assert made.get("true_cfg_scale") == scale


def test_no_scale_is_no_scale() -> None:
    """diffusers warns of its own default, 4, which has no effect then."""
    assert arguments(pipeline("QwenImagePipeline", False))["true_cfg_scale"] == 1
    assert "true_cfg_scale" not in arguments(pipeline("FluxPipeline", True))


@pytest.mark.parametrize(
    ("name", "told", "given", "param"),
    [
        ("QwenImagePipeline", False, {"guidance_scale": 5.0}, "guidance_scale"),
        ("FluxPipeline", False, {"guidance_scale": 5.0}, "guidance_scale"),
        ("FluxImg2ImgPipeline", False, {"guidance_scale": 5.0}, "guidance_scale"),
        ("FluxPipeline", True, {"negative": "rain"}, "negative_prompt"),
        ("QwenImagePipeline", False, {"negative": "r", "true_cfg_scale": 1.0}, "negative_prompt"),
    ],
)
def test_what_would_change_nothing_is_refused(name, told: bool, given, param: str) -> None:
    with pytest.raises(OmniClientError, match="`true_cfg_scale`") as refused:
        arguments(pipeline(name, told), **given)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "told"), [("FluxPipeline", True), ("Flux2KleinPipeline", False), ("WanPipeline", True)]
)
def test_guidance_that_is_heeded(name: str, told: bool) -> None:
    assert arguments(pipeline(name, told), guidance_scale=5.0)["guidance_scale"] == 5
