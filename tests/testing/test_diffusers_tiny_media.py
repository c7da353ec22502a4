# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints for videos and sounds run in stock diffusers and hear the prompt."""

from importlib.util import find_spec
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from tests.conftest import CHECKPOINTS
from vllm_omni.testing.diffusers_tiny import MODULES, Example, build, recipe
from vllm_omni.testing.diffusers_tiny.recipe import PROMPT

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

MEDIA = [
    name
    for module, names in MODULES.items()
    if module == "audio" or module.startswith("video")
    for name in names
]
MAX_BYTES = 25e6


def answers(
    pipeline: diffusers.DiffusionPipeline, example: Example, prompt: str
) -> list[np.ndarray]:
    """The video or sound, or both, of a request that differs in its prompt only."""
    generator = torch.Generator().manual_seed(0)
    made = pipeline(**example.arguments(prompt, steps=2), generator=generator, output_type="np")
    names = {example.output, "audio"} & set(made)
    return [np.asarray(made[name], dtype=np.float32) for name in sorted(names)]


@pytest.mark.parametrize("family", MEDIA)
def test_family_runs_in_stock_diffusers(family: str) -> None:
    examples = recipe(family).examples
    folder = build(family, CHECKPOINTS / "diffusers" / family)
    assert sum(file.stat().st_size for file in Path(folder).rglob("*.*")) < MAX_BYTES
    components = None
    for number, example in enumerate(examples):
        if missing := [name for name in example.needs if find_spec(name) is None]:
            pytest.skip(f"diffusers needs {', '.join(missing)} for {example.pipeline}")
        if number == 0:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
            assert type(pipeline).__name__ == example.pipeline
            components = pipeline.components
        else:
            pipeline = getattr(diffusers, example.pipeline).from_pretrained(folder, **components)
        pipeline.set_progress_bar_config(disable=True)
        first = answers(pipeline, example, PROMPT)
        other = answers(pipeline, example, "two blue circles in the rain")
        for made, changed in zip(first, other, strict=True):
            assert made.size > 500
            assert np.isfinite(made).all()
            assert made.std() > 1e-2
            assert np.abs(made - changed).max() > 1e-2
