# SPDX-License-Identifier: Apache-2.0
"""The sizes that HunyuanImage-3 paints (row A-76).

It was trained on shapes around a base size, from 1:4 to 4:1, which its language model names by
tokens. It paints some smaller and some common sizes as well: those of a shape that a bucket has are
the bucket's `extra_res`, those of other shapes are buckets of their own behind the trained ones.

Sizes are written "HEIGHTxWIDTH" here, as the model's own configuration writes them; `match` and
`get_target_size` speak in (width, height), as pictures do.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from vllm.logger import init_logger

logger = init_logger(__name__)

DEFAULT_BASE_SIZE = 1024
"""The model configuration's `image_base_size`, where it says none."""
ALIGNMENT = 16
EXTRA_RESOLUTIONS = (
    *("1024x768", "1280x720", "768x1024", "720x1280"),
    *("512x512", "640x640", "768x768", "896x896"),
)
TRAINED_RATIO_TOKENS = range(128_044, 128_077)
EXTRA_RATIO_TOKENS = range(130_103, 130_107)

Size = tuple[int, int]


class Resolution:
    """One size, and further ones of the same shape.

    Args:
        size: "HEIGHTxWIDTH", (height, width), or one number for a square.

    Attributes:
        height: In pixels.
        width: In pixels.
        extra_res: Further sizes of the same shape.

    Raises:
        ValueError: It is no size.
    """

    def __init__(self, size: str | int | Sequence[int]) -> None:
        self.height, self.width = _parsed(size)
        self.extra_res: list[Resolution] = []

    @property
    def ratio(self) -> float:
        """Height by width."""
        return self.height / self.width

    def has_shape_of(self, other: "Resolution") -> bool:
        """Whether height and width are in exactly the same ratio."""
        return self.height * other.width == other.height * self.width

    def match(self, width: int, height: int) -> Size:
        """Of this size and its extra ones, the (width, height) nearest in area."""
        area = width * height
        nearest = min(
            (self, *self.extra_res), key=lambda each: abs(each.height * each.width - area)
        )
        return nearest.width, nearest.height

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Resolution):
            return NotImplemented
        return (self.height, self.width) == (other.height, other.width)

    def __hash__(self) -> int:
        return hash((self.height, self.width))

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"

    def __repr__(self) -> str:
        extra = f", extra_res=[{', '.join(map(str, self.extra_res))}]" if self.extra_res else ""
        return f"Resolution({self}{extra})"


class ResolutionGroup:
    """The sizes around a base size: trained ones by rising ratio, then the extra ones.

    Args:
        base_size: Side of the square among them, in pixels; a multiple of 16.
        extra_resolutions: Further sizes.

    Raises:
        ValueError: There is no such group.
    """

    def __init__(
        self,
        base_size: int = DEFAULT_BASE_SIZE,
        extra_resolutions: Iterable[str | int | Sequence[int]] = EXTRA_RESOLUTIONS,
    ) -> None:
        if base_size < ALIGNMENT or base_size % ALIGNMENT:
            raise ValueError(f"image_base_size should be a multiple of {ALIGNMENT}: {base_size}")
        self.base_size = base_size
        self.data = _trained(base_size)
        self.trained = len(self.data)
        for size in extra_resolutions:
            self._add(Resolution(size))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Resolution:
        return self.data[index]

    def __repr__(self) -> str:
        return f"ResolutionGroup(base_size={self.base_size}, data={self.data})"

    def get_ratio_index(self, width: int, height: int) -> int:
        """The number of the bucket whose height by width is nearest."""
        ratio = height / width
        return min(range(len(self)), key=lambda index: abs(self.data[index].ratio - ratio))

    def get_target_size(self, width: int, height: int) -> Size:
        """The (width, height) to paint: nearest in shape first, then in area."""
        return self.data[self.get_ratio_index(width, height)].match(width, height)

    def _add(self, extra: Resolution) -> None:
        for bucket in self.data:
            if bucket.has_shape_of(extra):
                if extra not in (bucket, *bucket.extra_res):
                    bucket.extra_res.append(extra)
                return
        self.data.append(extra)


@lru_cache(maxsize=4)
def get_cached_resolution_group(base_size: int = DEFAULT_BASE_SIZE) -> ResolutionGroup:
    """The one group of a base size, for all who ask: what prepares images and what reads tokens."""
    return ResolutionGroup(base_size)


def size_named_by(token_id: int, prompt_size: Size, base_size: int = DEFAULT_BASE_SIZE) -> Size:
    """The (height, width) that a ratio token of the language model stands for.

    Args:
        token_id: What it said.
        prompt_size: The request's (height, width), which is kept if the token names none.
        base_size: Of the model.
    """
    group = get_cached_resolution_group(base_size)
    index = _ratio_index(token_id, group.trained)
    if index is None or index >= len(group):
        height, width = prompt_size
        logger.warning("Token %d names no shape: it stays %dx%d", token_id, height, width)
        return prompt_size
    return group[index].height, group[index].width


def _ratio_index(token_id: int, trained: int) -> int | None:
    if token_id in TRAINED_RATIO_TOKENS:
        return token_id - TRAINED_RATIO_TOKENS.start
    if token_id in EXTRA_RATIO_TOKENS:
        return trained + token_id - EXTRA_RATIO_TOKENS.start
    return None


def _trained(base_size: int) -> list[Resolution]:
    """The sizes from twice the base by half of it, in steps of a sixteenth, to the reverse.

    One side grows from the base to twice of it; the other shrinks by the same steps, to half of it.
    """
    step = base_size // 16
    sizes = [Resolution(base_size)]
    for k in range(1, 17):
        long = _aligned(min(base_size + k * step, 2 * base_size))
        short = _aligned(max(base_size - k * step, base_size // 2))
        sizes += [Resolution((long, short)), Resolution((short, long))]
    return sorted(sizes, key=lambda size: size.ratio)


def _aligned(side: int) -> int:
    return side // ALIGNMENT * ALIGNMENT


def _parsed(size: str | int | Sequence[int]) -> Size:
    match size:
        case str():
            sides = size.lower().split("x")
            numbers = [int(side) for side in sides if side.strip().isdecimal()]
            if len(numbers) != len(sides):
                raise ValueError(f"a resolution is HEIGHTxWIDTH, not {size!r}")
        case int():
            numbers = [size]
        case _:
            numbers = [int(side) for side in size]
    if len(numbers) == 1:
        numbers *= 2
    if len(numbers) != 2 or min(numbers) < 1:
        raise ValueError(f"a resolution has a height and a width above 0, not {size!r}")
    return numbers[0], numbers[1]
