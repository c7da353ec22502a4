# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusers checkpoints are complete, and their prompts, images and sizes matter (A-40)."""

from importlib.util import find_spec
from pathlib import Path

import diffusers
import pytest
import torch

from tests.conftest import CHECKPOINTS
from vllm_omni.testing.diffusers_tiny import FAMILIES, Example, build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

SEEN = 1e-2
"""A difference in some pixel, of 1, that no rounding makes."""

ALWAYS = ("sd15", "z_image")
OTHER_PROMPT = "a long and quite different description of blue rings"


def cases() -> list[object]:
    found = []
    for family in FAMILIES:
        for example in recipe(family).examples:
            # The tests of parity load and ask them all, too.
            marks = [] if family in ALWAYS else [pytest.mark.full_model]
            if missing := [name for name in example.needs if find_spec(name) is None]:
                marks.append(pytest.mark.skip(reason=f"diffusers needs {', '.join(missing)}"))
            found.append(
                pytest.param(family, example, id=f"{family}-{example.pipeline}", marks=marks)
            )
    return found


def make(pipeline: diffusers.DiffusionPipeline, example: Example, **changes: object) -> object:
    generator = torch.Generator().manual_seed(0)
    arguments = example.arguments(**changes)
    output = pipeline(**arguments, generator=generator, output_type="pt")[example.output]
    return output[0] if isinstance(output, list) else output


@pytest.mark.parametrize(("family", "example"), cases())
def test_checkpoint_loads_and_its_prompts_matter(family: str, example: Example) -> None:
    folder = build(family, CHECKPOINTS / "diffusers" / family)
    first = example is recipe(family).examples[0]
    loader = diffusers.DiffusionPipeline if first else getattr(diffusers, example.pipeline)
    pipeline = loader.from_pretrained(folder)
    assert type(pipeline).__name__ == example.pipeline
    pipeline.set_progress_bar_config(disable=True)
    picture = make(pipeline, example)
    assert torch.isfinite(picture).all()
    assert (picture - make(pipeline, example, prompt=OTHER_PROMPT)).abs().max() > SEEN


def test_building_again_changes_nothing(tmp_path: Path) -> None:
    folder = build("chroma", tmp_path / "chroma")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert build("chroma", folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        build("chroma", tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        build("nonesuch", tmp_path / "nonesuch")
