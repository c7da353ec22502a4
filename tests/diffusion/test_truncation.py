# SPDX-License-Identifier: Apache-2.0
"""A prompt that a text encoder does not read to its end is told in the log, whatever the pipeline
says of it itself: these two say nothing."""

import logging

import pytest

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, load, served
from vllm_omni.testing.diffusers_tiny import build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


@pytest.mark.parametrize(
    ("family", "read"),
    [("qwen_image", 34 + 512), ("wan21_t2v", 64)],  # a template's tokens come before the prompt's
)
def test_a_cut_prompt_is_told(family: str, read: int, caplog: pytest.LogCaptureFixture) -> None:
    (example, *_) = recipe(family).examples
    loaded = load(build(family, CHECKPOINTS / "diffusers" / family), example.pipeline)
    asks = [Ask("x " * 3000, steps=1), Ask("a cat", steps=1)]
    with caplog.at_level(logging.WARNING):
        served(loaded, example, asks)
    told = [line for line in caplog.messages if "is not read by one text encoder" in line]
    assert len(told) == 1
    assert told[0].startswith("0: the end of its prompt")
    assert told[0].endswith(f"of which {read} are read")
