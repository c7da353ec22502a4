# SPDX-License-Identifier: Apache-2.0
"""Draws captions that training had no like of, and counts how many pictures the checker passes.

    python -m recipes.demo.image.evaluate --model demo-image

Each caption names at least one count of a colour and shape that no training picture had.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import Lumina2Pipeline
from PIL import Image

from recipes.demo.image.checker import faults
from recipes.demo.image.scenes import Scene, SceneSource

ROWS = 50
"""Captions drawn together."""

SEED = 4000


def unseen_scenes(number: int) -> list[Scene]:
    """As many with different captions, all with something held out of training."""
    source, scenes = SceneSource(SEED, unseen=True), {}
    while len(scenes) < number:
        scene = source.draw()
        scenes[scene.caption] = scene
    return list(scenes.values())


def pictures(
    pipeline: Lumina2Pipeline, scenes: Sequence[Scene], **options: object
) -> list[np.ndarray]:
    """One of each scene, [height, width, 3] of bytes; the seed of each is its number."""
    made = []
    for start in range(0, len(scenes), ROWS):
        part = scenes[start : start + ROWS]
        dice = [torch.Generator().manual_seed(start + row) for row in range(len(part))]
        captions = [scene.caption for scene in part]
        images = pipeline(captions, generator=dice, output_type="np", **options).images
        made += list((images * 255).round().astype(np.uint8))
    return made


def sheet(made: Sequence[np.ndarray], columns: int = 8) -> Image.Image:
    """The pictures in rows, for people to look at."""
    rows = [np.concatenate(made[at : at + columns], 1) for at in range(0, len(made), columns)]
    return Image.fromarray(np.concatenate(rows, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seen", action="store_true", help="captions like those of training")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--sheet", type=Path, help="where a sheet of pictures is written")
    given = parser.parse_args()
    scenes = unseen_scenes(given.number)
    if given.seen:
        source = SceneSource(SEED)
        scenes = [source.draw() for _ in range(given.number)]
    pipeline = Lumina2Pipeline.from_pretrained(str(given.model), dtype=torch.float32)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    pipeline.set_progress_bar_config(disable=True)
    made = pictures(
        pipeline, scenes, num_inference_steps=given.steps, guidance_scale=given.guidance
    )
    wrong = [faults(picture, scene) for picture, scene in zip(made, scenes, strict=True)]
    for scene, reasons in [(s, w) for s, w in zip(scenes, wrong, strict=True) if w][:8]:
        print(f"  {scene.caption}: {'; '.join(reasons)}")
    groups = Counter((len(scene.groups), not bad) for scene, bad in zip(scenes, wrong, strict=True))
    told = {
        "steps": given.steps,
        "guidance": given.guidance,
        "seen": given.seen,
        "passed": sum(not reasons for reasons in wrong) / len(wrong),
        "one group": f"{groups[1, True]} of {groups[1, True] + groups[1, False]}",
        "two groups": f"{groups[2, True]} of {groups[2, True] + groups[2, False]}",
    }
    print(json.dumps(told), flush=True)
    if given.sheet:
        sheet(made[: len(made) // 8 * 8][:64]).save(given.sheet)


if __name__ == "__main__":
    main()
