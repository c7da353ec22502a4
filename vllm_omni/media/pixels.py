# SPDX-License-Identifier: Apache-2.0
"""A picture as an array and a few words about it, and back."""

from typing import Any

import msgspec
import numpy as np
from PIL import Image

_STRIP_BYTES = 1 << 20
"""Pillow copies so much at a time with Python's lock held."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """What a picture is besides its pixels.

    Attributes:
        mode: Pillow's name.
        width: Pixels.
        height: Pixels.
        palette: Its mode and its colours, if it has one.
        transparency: Pillow's word on which colours are transparent.
    """

    mode: str
    width: int
    height: int
    palette: tuple[str, bytes] | None = None
    transparency: int | bytes | tuple[int, int, int] | None = None


def eight_bit(image: Image.Image) -> Image.Image:
    """A grey picture of 16 bits as one of 8; others as they are.

    Pillow's own conversion cuts off what is above 255, which leaves white.
    """
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.uint32) // 257).astype(np.uint8))


def flattened(image: Image.Image) -> tuple[Picture, np.ndarray]:
    """A loaded picture and its pixels, uint8 ``[n]``, as Pillow packs them."""
    palette = image.palette
    about = Picture(
        mode=image.mode,
        width=image.width,
        height=image.height,
        palette=palette and (palette.mode, bytes(image.getpalette(palette.mode) or b"")),
        transparency=image.info.get("transparency"),
    )
    return about, np.frombuffer(image.tobytes(), np.uint8)


def rebuilt(about: Picture, pixels: np.ndarray) -> Image.Image:
    """The picture that `flattened` took apart.

    Raises:
        ValueError: The pixels do not fit.
    """
    image = Image.new(about.mode, (about.width, about.height))
    row = len(pixels) // about.height
    rows = max(1, _STRIP_BYTES // max(1, row))
    for top in range(0, about.height, rows):
        size = (about.width, min(rows, about.height - top))
        strip: Any = pixels[top * row : (top + size[1]) * row]
        image.paste(Image.frombuffer(about.mode, size, strip, "raw", about.mode, 0, 1), (0, top))
    if about.palette is not None:
        mode, colours = about.palette
        image.putpalette(colours, mode)
    if about.transparency is not None:
        image.info["transparency"] = about.transparency
    return image
