# SPDX-License-Identifier: Apache-2.0
"""Pictures to files (OpenAI's `output_format`, `output_compression` and `background`)."""

import io
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from vllm_omni.errors import OmniClientError

CONTENT_TYPES = MappingProxyType({"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"})
IMAGE_FORMATS = tuple(CONTENT_TYPES)
BACKGROUNDS = ("auto", "opaque", "transparent")
MAX_WEBP_SIDE = 16_383

_SAME = {"jpg": "jpeg"}
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
_FASTEST_DEFLATE, _SMALLEST_DEFLATE = 1, 9


def image_format(name: str, param: str = "output_format") -> str:
    """A format's own name.

    Raises:
        OmniClientError: There is no such format; names those there are.
    """
    format = name.lower()
    format = _SAME.get(format, format)
    if format not in CONTENT_TYPES:
        raise OmniClientError(
            f"{param}: unknown image format {name[:40]!r}; use one of {', '.join(IMAGE_FORMATS)}",
            param=param,
        )
    return format


def check_background(background: str, format: str, param: str = "background") -> None:
    """Refuse a background that there is not, or that the format cannot hold.

    Raises:
        OmniClientError: Names `param` and the fix.
    """
    if background not in BACKGROUNDS:
        raise OmniClientError(
            f"{param}: should be one of {', '.join(BACKGROUNDS)}, not {background[:40]!r}",
            param=param,
        )
    if background == "transparent" and format == "jpeg":
        raise OmniClientError(
            f"{param}: jpeg cannot be transparent; use output_format png or webp", param=param
        )


def encode_image(
    image: Image.Image,
    format: str = "png",
    *,
    compression: int | None = None,
    background: str = "auto",
) -> bytes:
    """One picture's file, without any metadata.

    Args:
        image: Of any mode. Its alpha channel is kept where the format has one, else it is put on
            white. A picture without one stays opaque whatever `background` says.
        format: One of `IMAGE_FORMATS`.
        compression: 0 to 100, OpenAI's percentage: the quality of jpeg and webp (100 by default),
            for png how quickly it is made, from smallest to fastest; png loses nothing.
        background: One of `BACKGROUNDS`; `opaque` puts the picture on white.

    Raises:
        OmniClientError: The picture does not fit into the format, or `background` does not.
    """
    check_background(background, format)
    if format == "webp" and max(image.size) > MAX_WEBP_SIDE:
        raise OmniClientError(
            f"output_format: webp holds up to {MAX_WEBP_SIDE} pixels a side; use png",
            param="output_format",
        )
    keeps_alpha = format != "jpeg" and background != "opaque"
    prepared = _prepared(image, keeps_alpha)
    file = io.BytesIO()
    prepared.save(
        file, format.upper(), **_options(format, 100 if compression is None else compression)
    )
    return file.getvalue()


def to_image(pixels: np.ndarray) -> Image.Image:
    """The picture in uint8 ``[height, width, 3 or 4]`` (or ``[height, width]``, grey)."""
    return Image.fromarray(pixels)


def _prepared(image: Image.Image, keeps_alpha: bool) -> Image.Image:
    """In a mode that every format can hold, on white if it may not be transparent."""
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        rgba = image.convert("RGBA")
        if keeps_alpha:
            return _bare(rgba)
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return _bare(image if image.mode in ("RGB", "L") else image.convert("RGB"))


def _bare(image: Image.Image) -> Image.Image:
    """The same pixels without comments, profiles and the like."""
    if not image.info:
        return image
    bare = image.copy()
    bare.info = {}
    return bare


def _options(format: str, compression: int) -> dict[str, Any]:
    if format == "png":
        range = _SMALLEST_DEFLATE - _FASTEST_DEFLATE
        return {"compress_level": _FASTEST_DEFLATE + round(range * (100 - compression) / 100)}
    if format == "webp":
        return {"quality": compression, "method": 2}
    return {"quality": max(1, compression)}  # 0 is Pillow's default
