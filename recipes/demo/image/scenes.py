# SPDX-License-Identifier: Apache-2.0
"""What a caption says: groups of coloured shapes and where they are, and the words for it."""

import random
from dataclasses import dataclass
from itertools import product

COLOURS = {
    "red": (215, 40, 40),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 70),
    "blue": (40, 80, 215),
    "purple": (135, 50, 175),
    "pink": (250, 145, 195),
    "black": (25, 25, 25),
}
SHAPES = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "diamond": "diamonds",
    "star": "stars",
    "cross": "crosses",
}
COUNTS = {1: "a", 2: "two", 3: "three", 4: "four"}
CORNERS = (
    "in the top left corner",
    "in the top right corner",
    "in the bottom left corner",
    "in the bottom right corner",
)
SIDES = ("on the left", "on the right", "at the top", "at the bottom")
CENTRE = "in the centre"
RELATIONS = {
    "above": ("at the top", "at the bottom"),
    "below": ("at the bottom", "at the top"),
    "to the left of": ("on the left", "on the right"),
    "to the right of": ("on the right", "on the left"),
}
"""Each with the sides that a picture puts its two groups on."""

MAX_OBJECTS = 5
"""Of one picture."""


@dataclass(frozen=True)
class Group:
    """So many objects of one colour and shape, all of them at `place` where one is named."""

    count: int
    colour: str
    shape: str
    place: str | None = None

    @property
    def words(self) -> str:
        count = "an" if self.count == 1 and self.colour[0] in "aeiou" else COUNTS[self.count]
        shape = self.shape if self.count == 1 else SHAPES[self.shape]
        place = f" {self.place}" if self.place else ""
        return f"{count} {self.colour} {shape}{place}"

    @property
    def combination(self) -> tuple[int, str, str]:
        return self.count, self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """One or two groups; with a `relation`, the first stands so to the second."""

    groups: tuple[Group, ...]
    relation: str | None = None

    @property
    def caption(self) -> str:
        return f" {self.relation or 'and'} ".join(group.words for group in self.groups)


def all_combinations() -> list[tuple[int, str, str]]:
    return list(product(COUNTS, COLOURS, SHAPES))


def held_out_combinations(seed: int = 7) -> frozenset[tuple[int, str, str]]:
    """Counts of a colour and shape that no training picture has: a fifth of all.

    Of four colours with a shape, training has no count at all.
    """
    dice = random.Random(seed)
    pairs = list(zip(dice.sample(list(COLOURS), 4), dice.sample(list(SHAPES), 4), strict=True))
    held = {(count, *pair) for pair in pairs for count in COUNTS}
    rest = [combination for combination in all_combinations() if combination not in held]
    return frozenset(held | set(dice.sample(rest, len(all_combinations()) // 5 - len(held))))


class SceneSource:
    """Scenes drawn from a seed. Those for training avoid `held_out`; others have one of it."""

    def __init__(self, seed: int, *, unseen: bool = False) -> None:
        self._dice = random.Random(seed)
        held = held_out_combinations()
        self._seen = sorted(set(all_combinations()) - held)
        self._unseen = sorted(held)
        self._wants_unseen = unseen

    def draw(self) -> Scene:
        pool = self._unseen if self._wants_unseen else self._seen
        first = self._dice.choice(pool)
        if self._dice.random() < 0.3:
            return Scene((self._placed(first),))
        second = self._second(first)
        pair = [first, second]
        self._dice.shuffle(pair)
        if self._dice.random() < 0.35:
            relation = self._dice.choice(list(RELATIONS))
            return Scene((Group(*pair[0]), Group(*pair[1])), relation)
        groups = (self._placed(pair[0]), self._placed(pair[1]))
        return Scene(groups) if _fits(groups) else self.draw()

    def _second(self, first: tuple[int, str, str]) -> tuple[int, str, str]:
        """One more that training may have, unlike the first and not too many objects with it."""
        while True:
            second = self._dice.choice(self._seen)
            if second[1:] != first[1:] and first[0] + second[0] <= MAX_OBJECTS:
                return second

    def _placed(self, combination: tuple[int, str, str]) -> Group:
        places: list[str | None] = [None, *SIDES, *SIDES]
        if combination[0] <= 2:
            places += CORNERS
        if combination[0] == 1:
            places.append(CENTRE)
        return Group(*combination, self._dice.choice(places))


def _fits(groups: tuple[Group, Group]) -> bool:
    """Whether there is room for both where they are to be."""
    first, second = groups
    if first.place in (*CORNERS, CENTRE) and first.place == second.place:
        return False
    crowded = first.place is not None and second.place is not None
    return not crowded or first.count + second.count <= 4 or first.place != second.place
