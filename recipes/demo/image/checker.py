# SPDX-License-Identifier: Apache-2.0
"""Whether a picture shows what its caption says, judged by rules from its pixels alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from recipes.demo.image.scenes import CENTRE, COLOURS, RELATIONS, SHAPES, Group, Scene

SPECK = 25
"""Pixels of a 128 x 128 picture under which a blot is no object."""

FOREGROUND = 90
"""Distance from the background's colour in RGB from which on a pixel is of an object."""

LIKENESS = 0.7
"""Overlap with its template, as a share of the area that either covers, that a shape must have."""

NOT_FAR = 0.15
"""How far from the middle, in picture widths, the centre reaches."""


@dataclass(frozen=True)
class Found:
    """An object in a picture; its centre in picture widths, from the top left."""

    colour: str
    shape: str | None
    x: float
    y: float


def objects_in(picture: np.ndarray) -> list[Found]:
    """The objects in [height, width, 3] of unsigned bytes on a light background."""
    values = picture.astype(float)
    background = np.median(values.reshape(-1, 3), axis=0)
    apart = np.linalg.norm(values - background, axis=-1) > FOREGROUND
    labels, _ = ndimage.label(apart)
    height, width = apart.shape
    found = []
    for index, box in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[box] == index
        if mask.sum() * (128 * 128) / (height * width) < SPECK:
            continue
        top, left = box[0].start, box[1].start
        found.append(
            Found(
                _colour(values[box], mask),
                _shape(mask),
                (left + mask.shape[1] / 2) / width,
                (top + mask.shape[0] / 2) / height,
            )
        )
    return found


def faults(picture: np.ndarray, scene: Scene) -> list[str]:
    """What in the picture is not as the scene has it; none if it is right."""
    found = objects_in(picture)
    wanted = Counter({(group.colour, group.shape): group.count for group in scene.groups})
    there = Counter((one.colour, one.shape) for one in found)
    wrong = [
        f"{there[kind]} rather than {wanted[kind]} of {kind[0]} {kind[1]}"
        for kind in wanted | there
        if wanted[kind] != there[kind]
    ]
    members = [_members(found, group) for group in scene.groups]
    for group, objects in zip(scene.groups, members, strict=True):
        if group.place and not all(_is_at(group.place, one) for one in objects):
            wrong.append(f"{group.words}: elsewhere")
    if scene.relation and all(members) and not _RELATED[scene.relation](*members):
        wrong.append(f"not {scene.relation}")
    return wrong


def _members(found: list[Found], group: Group) -> list[Found]:
    return [one for one in found if (one.colour, one.shape) == (group.colour, group.shape)]


def _is_at(place: str, one: Found) -> bool:
    if place == CENTRE:
        return max(abs(one.x - 0.5), abs(one.y - 0.5)) <= NOT_FAR
    words = place.split()
    horizontal = "left" not in words or one.x < 0.5
    horizontal &= "right" not in words or one.x > 0.5
    vertical = "top" not in words or one.y < 0.5
    return horizontal and vertical and ("bottom" not in words or one.y > 0.5)


def _colour(values: np.ndarray, mask: np.ndarray) -> str:
    """The palette's colour nearest to the median of the inside."""
    inside = ndimage.binary_erosion(mask)
    median = np.median(values[inside if inside.any() else mask], axis=0)
    return min(COLOURS, key=lambda name: float(np.linalg.norm(median - COLOURS[name])))


def _shape(mask: np.ndarray) -> str | None:
    """The shape most like the mask when both fill one box; none if it is like no shape."""
    box = np.asarray(
        Image.fromarray(mask.astype(np.uint8) * 255).resize((_BOX, _BOX), Image.Resampling.BILINEAR)
    )
    likeness = {name: _overlap(box > 127, _template(name)) for name in SHAPES}
    best = max(likeness, key=lambda name: likeness[name])
    return best if likeness[best] >= LIKENESS else None


def _overlap(one: np.ndarray, other: np.ndarray) -> float:
    return float((one & other).sum() / (one | other).sum())


_BOX = 48


@cache
def _template(name: str) -> np.ndarray:
    """The shape filling a box, as polygons have it."""
    scale = 8
    canvas = Image.new("L", (_BOX * scale, _BOX * scale))
    pen, full = ImageDraw.Draw(canvas), _BOX * scale - 1
    if name == "circle":
        pen.ellipse((0, 0, full, full), fill=255)
    else:
        pen.polygon([(x * full, y * full) for x, y in _polygon(name)], fill=255)
    return np.asarray(canvas.resize((_BOX, _BOX), Image.Resampling.BOX)) > 127


def _polygon(name: str) -> list[tuple[float, float]]:
    """Corners in the unit square, which the shape fills."""
    if name == "square":
        return [(0, 0), (1, 0), (1, 1), (0, 1)]
    if name == "triangle":
        return [(0.5, 0), (1, 1), (0, 1)]
    if name == "diamond":
        return [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]
    if name == "cross":
        near, far = 0.5 - 0.36 / 2.1, 0.5 + 0.36 / 2.1
        upper = [(near, near), (near, 0), (far, 0), (far, near), (1, near), (1, far)]
        return [*upper, (far, far), (far, 1), (near, 1), (near, far), (0, far), (0, near)]
    tips = [
        (radius * sin(turn * pi / 5), -radius * cos(turn * pi / 5))
        for turn in range(10)
        for radius in ((1.0, 0.45)[turn % 2],)
    ]
    left, right = min(x for x, _ in tips), max(x for x, _ in tips)
    top, bottom = min(y for _, y in tips), max(y for _, y in tips)
    return [((x - left) / (right - left), (y - top) / (bottom - top)) for x, y in tips]


def _before(axis: str) -> Callable[[list[Found], list[Found]], bool]:
    def holds(first: list[Found], second: list[Found]) -> bool:
        place = {"x": lambda one: one.x, "y": lambda one: one.y}[axis]
        return max(map(place, first)) < min(map(place, second))

    return holds


_RELATED: dict[str, Callable[[list[Found], list[Found]], bool]] = {
    "above": _before("y"),
    "below": lambda first, second: _before("y")(second, first),
    "to the left of": _before("x"),
    "to the right of": lambda first, second: _before("x")(second, first),
}
assert _RELATED.keys() == RELATIONS.keys()
