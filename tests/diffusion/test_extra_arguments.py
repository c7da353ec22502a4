# SPDX-License-Identifier: Apache-2.0
"""What may come as an extra argument of a pipeline, and how sizes that fit no model are told.

Rows A-44, A-47.
"""

from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from vllm_omni.diffusion.programs.diffusers.extra import extra_argument
from vllm_omni.diffusion.programs.diffusers.shapes import LONG_PROMPT, field_at_fault
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest, OmniDiffusionSamplingParams, checked_params

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


class Painter(DiffusionPipeline):
    """Has a parameter of each kind."""

    def __call__(
        self,
        prompt: str | list[str] | None = None,
        prompt_2: str | list[str] | None = None,
        height: int | None = None,
        prior_num_inference_steps: int = 25,
        eta: float = 0.0,
        timesteps: list[int] = None,  # noqa: RUF013 - as some of diffusers' are
        original_size: tuple[int, int] | None = None,
        ip_adapter_image: Image.Image | torch.Tensor | None = None,
        decode_chunk_size=None,
        latents: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Do nothing."""


def extra(name: str, value: Any) -> Any:
    return extra_argument(Painter, name, value, {"height"})


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("prompt_2", "a dog", "a dog"),
        ("prior_num_inference_steps", 3, 3),
        ("eta", 1, 1.0),
        ("timesteps", [3, 2], [3, 2]),
        ("timesteps", None, None),
        ("original_size", [32, 16], (32, 16)),
        ("decode_chunk_size", 4, 4),
    ],
)
def test_what_the_annotation_says_is_taken(name: str, value: Any, taken: Any) -> None:
    assert extra(name, value) == taken


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prompt_2", value) for value in (5, ["a", "b"], {"a": 1})),
        *(
            ("prior_num_inference_steps", value)
            for value in ("many", None, [1], 1001, 10**9, -2000)
        ),
        *(("eta", value) for value in ("x", None, {}, 1e300)),
        *(("timesteps", value) for value in ("abc", ["a"], [[1]], [10**12])),
        *(("original_size", value) for value in ([1], [1, 2, 3], "32x32")),
        *(("ip_adapter_image", value) for value in ("http://127.0.0.1/", [1])),
        *((name, 1) for name in ("height", "latents", "prompt", "self", "kwargs", "__class__", "")),
    ],
)
def test_all_else_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OmniClientError, match=f"`extra_args.{name}`") as refused:
        extra(name, value)
    assert refused.value.param == f"extra_args.{name}"


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, float("nan"), [float("inf")], "x" * 70_000, [0] * 20_000, [[2**80]]],
)
def test_what_cannot_be_sent_is_refused_first(value: Any) -> None:
    with pytest.raises(OmniClientError) as refused:
        checked_params({"extra_args": {"a": value}}, "")
    assert refused.value.param == "extra_args.a"


def test_no_depth_is_too_deep() -> None:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(OmniClientError):
        checked_params({"extra_args": {"a": value}}, "")


TOO_LONG = RuntimeError("The size of tensor a (8) must match the size of tensor b (32)")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"media": {"image": 3}, "params": OmniDiffusionSamplingParams(height=32)}, "image"),
        ({"params": OmniDiffusionSamplingParams(num_frames=9, width=32)}, "num_frames"),
        ({"params": OmniDiffusionSamplingParams(width=32)}, "height"),
        ({"media": {"mask_image": 1}}, "mask_image"),
        ({"prompt": "a" * (LONG_PROMPT + 1)}, "prompt"),
        ({"prompt": "a cat"}, None),
    ],
)
def test_whose_size_a_model_cannot_take(asked: dict[str, Any], field: str | None) -> None:
    assert field_at_fault(TOO_LONG, GenerationRequest(**asked)) == field


def test_other_failures_are_nobodys_fault() -> None:
    asked = GenerationRequest(params=OmniDiffusionSamplingParams(height=32))
    assert field_at_fault(RuntimeError("CUDA error: an illegal access"), asked) is None
    assert field_at_fault(torch.OutOfMemoryError("size of tensor"), asked) is None
