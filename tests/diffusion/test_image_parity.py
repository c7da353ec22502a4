# SPDX-License-Identifier: Apache-2.0
"""Every image family: a mixed batch equals the stock pipeline, called alone (A-40, A-41)."""

import pytest
import torch

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import MIXED, counted, load, served, stock
from vllm_omni.testing.diffusers_tiny import MODULES, Example, build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

IMAGES = (
    "stable_diffusion",
    "flux",
    "qwen_image",
    "qwen_encoders",
    "t5_encoders",
    "llm_encoders",
)
BOUND = 1e-4
DOUBLE = {"LongCatImageEditPipeline"}
"""Compared in double precision: their VAE reads a megapixel whose channels come last, and torch's
GroupNorm on a CPU adds such up one by one. In single precision it is off by 5e-4 by itself, by
another amount for every batch size."""


def cases() -> list[object]:
    found = []
    for family in (name for module in IMAGES for name in MODULES[module]):
        for number, example in enumerate(recipe(family).examples):
            marks = [pytest.mark.full_model] if example.heavy or number else []
            found.append(pytest.param(family, example, id=example.pipeline, marks=marks))
    return found


@pytest.mark.parametrize(("family", "example"), cases())
def test_a_mixed_batch_equals_the_stock_pipeline(
    family: str, example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(family, CHECKPOINTS / "diffusers" / family)
    dtype = torch.float64 if example.pipeline in DOUBLE else torch.float32
    loaded = load(folder, example.pipeline, dtype)
    asks = MIXED[:3] if example.heavy else MIXED
    with counted(loaded) as together:
        made = served(loaded, example, asks)
    (alone,) = served(loaded, example, asks[:1])
    with counted(loaded) as apart:
        wanted = [stock(loaded, example, ask) for ask in asks]
    torch.testing.assert_close(alone, wanted[0], atol=BOUND, rtol=0)
    for ask, picture, reference in zip(asks, made, wanted, strict=True):
        torch.testing.assert_close(
            picture, reference, atol=BOUND, rtol=0, msg=lambda m, a=ask: f"{a}: {m}"
        )
    assert len(together) <= 0.7 * len(apart)
    # No model is without rules, and none of them proved wrong.
    ours = [r for r in caplog.records if r.name.startswith("vllm_omni")]
    assert [r.getMessage() for r in ours if not r.name.endswith(".truncation")] == []
