# SPDX-License-Identifier: Apache-2.0
"""Each picture format holds the picture it was given."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from vllm_omni.errors import OmniClientError
from vllm_omni.media.image_encode import (
    BACKGROUNDS,
    IMAGE_FORMATS,
    MAX_WEBP_SIDE,
    check_background,
    encode_image,
    image_format,
    to_image,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I", "F")


def gradient(width: int, height: int, channels: int = 3) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    planes = [rows * 3, columns * 3, rows + columns, np.full_like(rows, 128)]
    return to_image(np.stack(planes[:channels], -1).clip(0, 255).astype(np.uint8))


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(IMAGE_FORMATS), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_every_size_and_compression(width: int, height: int, format: str, compression: int) -> None:
    image = gradient(width, height)
    found = opened(encode_image(image, format, compression=compression))
    assert (found.format, found.size) == (format.upper(), (width, height))
    if format == "png":
        np.testing.assert_array_equal(np.asarray(found), np.asarray(image))


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_every_mode(format: str, mode: str, background: str) -> None:
    if background == "transparent" and format == "jpeg":
        with pytest.raises(OmniClientError) as refused:
            encode_image(gradient(9, 7).convert(mode), format, background=background)
        assert refused.value.param == "background"
        return
    image = gradient(9, 7, 4).convert(mode)
    found = opened(encode_image(image, format, background=background))
    assert found.size == (9, 7)
    if mode in ("RGBA", "LA"):
        assert (found.mode == "RGBA") == (format != "jpeg" and background != "opaque")


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_what_is_transparent_becomes_white_where_it_may_not_be(format: str) -> None:
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    found = opened(encode_image(clear, format, background="opaque"))
    assert np.asarray(found.convert("RGB")).min() >= 250
    if format != "jpeg":
        kept = opened(encode_image(clear, format, background="transparent"))
        assert kept.getchannel("A").getextrema() == (0, 0)


@pytest.mark.parametrize("format", ["jpeg", "webp"])
def test_compression_is_quality(format: str) -> None:
    noise = to_image(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    sizes = [len(encode_image(noise, format, compression=level)) for level in (0, 30, 60, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 2
    assert encode_image(noise, format) == encode_image(noise, format, compression=100)


def test_a_palette_with_a_transparent_colour_keeps_it() -> None:
    image = gradient(8, 8).quantize(4)
    image.info["transparency"] = 0
    assert opened(encode_image(image, "png")).mode == "RGBA"


@pytest.mark.parametrize("format", IMAGE_FORMATS)
def test_no_metadata_leaves(format: str) -> None:
    image = gradient(8, 8)
    image.info |= {"icc_profile": b"secret", "exif": b"Exif\0\0secret", "comment": "secret"}
    text = PngImagePlugin.PngInfo()
    text.add_text("secret", "secret")
    image.info["pnginfo"] = text
    data = encode_image(image, format)
    assert b"secret" not in data
    assert image.info  # the caller's picture is as it was


@pytest.mark.parametrize(("name", "format"), [("JPG", "jpeg"), ("PNG", "png"), ("WebP", "webp")])
def test_names(name: str, format: str) -> None:
    assert image_format(name) == format


def test_unknown_names_are_told() -> None:
    with pytest.raises(OmniClientError, match=r"output_format.*png, jpeg, webp") as refused:
        image_format("../../etc/passwd")
    assert refused.value.param == "output_format"
    with pytest.raises(OmniClientError, match="auto, opaque, transparent"):
        check_background("plaid", "png")


def test_webp_is_not_made_where_it_cannot_be() -> None:
    with pytest.raises(OmniClientError) as refused:
        encode_image(Image.new("L", (MAX_WEBP_SIDE + 1, 1)), "webp")
    assert refused.value.param == "output_format"
