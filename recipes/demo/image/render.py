# SPDX-License-Identifier: Apache-2.0
"""Scenes as pictures, many at once by tensor operations: where each object is, and its pixels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.demo.image.scenes import (
    CENTRE,
    COLOURS,
    CORNERS,
    MAX_OBJECTS,
    RELATIONS,
    SHAPES,
    SIDES,
    Scene,
)

SIZE = 128
"""Pixels on a side."""

BACKGROUND = (250, 250, 250)
RADII = (10.0, 14.0)
EDGE = 18.0
"""Nearest to the picture's edge that an object's centre comes."""

INNER = 8.0
"""Nearest to the middle line that the centre of an object on one side comes."""

GAP = 3.0
"""Between two objects, at least."""

REACH = 1.15
"""Farthest that any shape of radius 1 reaches."""

CANDIDATES = 64
"""Places tried for each object."""

LOW, HIGH, MIDDLE = (EDGE, SIZE / 2 - INNER), (SIZE / 2 + INNER, SIZE - EDGE), SIZE / 2
ALL = (EDGE, SIZE - EDGE)
REGIONS: dict[str | None, tuple[tuple[float, float], tuple[float, float]]] = {
    None: (ALL, ALL),
    **dict(zip(SIDES, ((LOW, ALL), (HIGH, ALL), (ALL, LOW), (ALL, HIGH)), strict=True)),
    **dict(zip(CORNERS, ((LOW, LOW), (HIGH, LOW), (LOW, HIGH), (HIGH, HIGH)), strict=True)),
    CENTRE: ((MIDDLE - 5, MIDDLE + 5), (MIDDLE - 5, MIDDLE + 5)),
}
"""For each place the span of x and that of y in which centres are."""


@dataclass(frozen=True)
class Plans:
    """What is drawn, a row for each picture: objects' colours and shapes, and where they may be.

    `colours` and `shapes` are [rows, objects] indices, -1 where there is no object; `regions` is
    [rows, objects, 4]: least and most x, least and most y.
    """

    colours: Tensor
    shapes: Tensor
    regions: Tensor

    def take(self, rows: Tensor) -> "Plans":
        return Plans(self.colours[rows], self.shapes[rows], self.regions[rows])

    def to(self, device: torch.device) -> "Plans":
        return Plans(self.colours.to(device), self.shapes.to(device), self.regions.to(device))


def plans_of(scenes: Sequence[Scene]) -> Plans:
    """The objects of each scene, those with the least room first."""
    colours, shapes = list(COLOURS), list(SHAPES)
    rows = []
    for scene in scenes:
        places = RELATIONS.get(scene.relation or "", tuple(group.place for group in scene.groups))
        objects = []
        for group, place in zip(scene.groups, places, strict=True):
            (left, right), (top, bottom) = REGIONS[place]
            one = (colours.index(group.colour), shapes.index(group.shape), left, right, top, bottom)
            objects += [one] * group.count
        objects.sort(key=lambda one: (one[3] - one[2]) * (one[5] - one[4]))
        rows.append(objects + [(-1, -1, *ALL, *ALL)] * (MAX_OBJECTS - len(objects)))
    table = torch.tensor(rows)
    return Plans(table[..., 0].long(), table[..., 1].long(), table[..., 2:])


def place(plans: Plans, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Centres [rows, objects, 2] and radii [rows, objects], drawn at random.

    The third tensor, [rows], says in which pictures all objects found room.
    """
    rows, device = len(plans.colours), plans.colours.device
    uniform = torch.rand(rows, MAX_OBJECTS, CANDIDATES, 2, device=device, generator=dice)
    low, high = plans.regions[..., None, 0::2], plans.regions[..., None, 1::2]
    candidates = low + uniform * (high - low)
    drawn = torch.rand(rows, MAX_OBJECTS, device=device, generator=dice)
    radii = RADII[0] + drawn * (RADII[1] - RADII[0])
    there = plans.colours >= 0
    centres = candidates[:, :, 0].clone()
    found = torch.ones(rows, dtype=torch.bool, device=device)
    for index in range(1, MAX_OBJECTS):
        distances = torch.cdist(candidates[:, index], centres[:, :index])
        needed = REACH * (radii[:, index, None] + radii[:, :index]) + GAP
        free = (distances >= needed[:, None]) | ~there[:, None, :index]
        free = free.all(dim=-1)
        first = free.int().argmax(dim=-1)
        centres[:, index] = candidates[torch.arange(rows, device=device), index, first]
        found &= free.any(dim=-1) | ~there[:, index]
    return centres, radii, found


def draw(plans: Plans, centres: Tensor, radii: Tensor) -> Tensor:
    """Pictures [rows, 3, SIZE, SIZE] in [-1, 1], with smooth edges of one pixel."""
    device = centres.device
    palette = torch.tensor([*COLOURS.values(), BACKGROUND], device=device) / 127.5 - 1
    pixels = torch.arange(SIZE, device=device) + 0.5
    pictures = palette[-1, :, None, None].expand(len(centres), 3, SIZE, SIZE)
    for index in range(MAX_OBJECTS):
        x = (pixels[None, None, :] - centres[:, index, 0, None, None]).expand(-1, SIZE, -1)
        y = (pixels[None, :, None] - centres[:, index, 1, None, None]).expand(-1, -1, SIZE)
        outside = _distance(x, y, radii[:, index, None, None], plans.shapes[:, index, None, None])
        cover = (0.5 - outside).clamp(0, 1)[:, None]
        colour = palette[plans.colours[:, index]][:, :, None, None]
        pictures = torch.lerp(pictures, colour, cover)
    return pictures


def _distance(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """How far outside its shape each point is; far outside where `shape` is -1."""
    apart_x, apart_y = x.abs(), y.abs()
    circle = (x.square() + y.square()).sqrt() - radius
    square = torch.maximum(apart_x, apart_y) - 0.85 * radius
    low = 0.56 * radius
    triangle = torch.maximum(y - low, 3**0.5 / 2 * apart_x - y / 2 - low)
    diamond = (apart_x + apart_y - 1.15 * radius) / 2**0.5
    cross = torch.minimum(
        torch.maximum(apart_x - 1.05 * radius, apart_y - 0.36 * radius),
        torch.maximum(apart_x - 0.36 * radius, apart_y - 1.05 * radius),
    )
    distance = torch.full_like(x, float(SIZE))
    options = (circle, square, triangle, diamond, _star(x, y, 1.15 * radius), cross)
    for index, option in enumerate(options):
        distance = torch.where(shape == index, option, distance)
    return distance


def _star(x: Tensor, y: Tensor, tip: Tensor) -> Tensor:
    """Of five tips, one of them up: each half of a tip is one straight edge."""
    fifth = 2 * torch.pi / 5
    angle = torch.atan2(x, -y)
    folded = (angle - fifth * torch.round(angle / fifth)).abs()
    far = (x.square() + y.square()).sqrt()
    along, across = far * torch.cos(folded), far * torch.sin(folded)
    notch = 0.45
    edge_x, edge_y = notch * 0.809017 - 1, notch * 0.587785
    return ((along - tip) * edge_y - across * edge_x) / (edge_x**2 + edge_y**2) ** 0.5


def pictures_of(plans: Plans, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures [rows, 3, SIZE, SIZE] in [-1, 1], and [rows]: which of them are whole."""
    centres, radii, found = place(plans, dice)
    return draw(plans, centres, radii), found
