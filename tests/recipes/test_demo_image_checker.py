# SPDX-License-Identifier: Apache-2.0
"""The judge of demo-image's pictures: it passes what is drawn to the caption, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.demo.image.checker import faults
from recipes.demo.image.evaluate import unseen_scenes
from recipes.demo.image.render import pictures_of, plans_of
from recipes.demo.image.scenes import (
    COLOURS,
    COUNTS,
    RELATIONS,
    SHAPES,
    Group,
    Scene,
    SceneSource,
    held_out_combinations,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

OPPOSITE = {"left": "right", "right": "left", "top": "bottom", "bottom": "top"}


@pytest.fixture(scope="module")
def drawn() -> list[tuple[Scene, np.ndarray]]:
    """Training scenes with their true pictures."""
    source = SceneSource(seed=11)
    scenes = [source.draw() for _ in range(300)]
    pictures, whole = pictures_of(plans_of(scenes), torch.Generator().manual_seed(5))
    values = ((pictures + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    return [
        pair for pair, fits in zip(zip(scenes, values, strict=True), whole, strict=True) if fits
    ]


def test_true_pictures_pass(drawn: list[tuple[Scene, np.ndarray]]) -> None:
    passed = sum(not faults(picture, scene) for scene, picture in drawn)
    assert len(drawn) > 200
    assert passed >= 0.99 * len(drawn)


@pytest.mark.parametrize("part", ["count", "colour", "shape", "place", "relation"])
def test_a_caption_with_one_thing_wrong_fails(
    drawn: list[tuple[Scene, np.ndarray]], part: str
) -> None:
    tried = [(wrong, picture) for scene, picture in drawn for wrong in _spoilt(scene, part)]
    assert len(tried) > 50
    passed = [wrong.caption for wrong, picture in tried if not faults(picture, wrong)]
    assert not passed


def test_an_empty_picture_fails() -> None:
    blank = np.full((128, 128, 3), 250, dtype=np.uint8)
    assert faults(blank, Scene((Group(1, "red", "circle"),)))


def test_size_does_not_matter(drawn: list[tuple[Scene, np.ndarray]]) -> None:
    doubled = [(scene, picture.repeat(2, 0).repeat(2, 1)) for scene, picture in drawn[:50]]
    assert not [faults(picture, scene) for scene, picture in doubled if faults(picture, scene)]


def test_training_never_draws_what_is_held_out() -> None:
    held = held_out_combinations()
    source = SceneSource(seed=12)
    seen = {group.combination for _ in range(3000) for group in source.draw().groups}
    assert len(held) == 38
    assert not seen & held
    assert len(seen) == len(COUNTS) * len(COLOURS) * len(SHAPES) - len(held)
    never = {kind[1:] for kind in held} - {kind[1:] for kind in seen}
    assert len(never) == 4


def test_unseen_captions_are_unlike_and_each_has_something_held_out() -> None:
    scenes = unseen_scenes(200)
    held = held_out_combinations()
    assert len({scene.caption for scene in scenes}) == 200
    assert all(any(group.combination in held for group in scene.groups) for scene in scenes)


def _spoilt(scene: Scene, part: str) -> list[Scene]:
    """The scene with one thing in it changed for another."""
    first, *others = scene.groups
    if part == "relation":
        if scene.relation is None:
            return []
        names = list(RELATIONS)
        opposite = names[names.index(scene.relation) ^ 1]
        return [replace(scene, relation=opposite)]
    if part == "place":
        words = (first.place or "").split()
        if not OPPOSITE.keys() & set(words):
            return []
        place = " ".join(OPPOSITE.get(word, word) for word in words)
        return [replace(scene, groups=(replace(first, place=place), *others))]
    choices = {"count": list(COUNTS), "colour": list(COLOURS), "shape": list(SHAPES)}[part]
    value = vars(first)[part]
    after = choices[(choices.index(value) + 1) % len(choices)]
    return [replace(scene, groups=(replace(first, **{part: after}), *others))]
