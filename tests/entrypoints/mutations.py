# SPDX-License-Identifier: Apache-2.0
"""Real files of every type that a client may send, and ways to damage them."""

import base64
import io
from collections.abc import Callable
from typing import NamedTuple

import av
import numpy as np
from PIL import Image

from vllm_omni.media.audio_encode import encode
from vllm_omni.testing import media

RATE = 24_000
INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
HEAD_BYTES = 256


class Sample(NamedTuple):
    """A file. `kind` is how a request calls it: image, audio or video."""

    kind: str
    mime: str
    data: bytes


def samples() -> dict[str, Sample]:
    """One small, whole file of each type."""
    pictures = {
        name: Sample("image", f"image/{name}", _picture(name.upper(), frames))
        for name, frames in (
            *(("png", 1), ("jpeg", 1), ("gif", 3), ("webp", 1), ("bmp", 1), ("tiff", 1)),
            ("avif", 1),
        )
    }
    sound = media.sound(0.2, RATE)
    sounds = {
        name: Sample("audio", f"audio/{name}", encode(sound, RATE, name))
        for name in ("wav", "mp3", "flac", "opus", "aac")
    }
    sounds["ogg"] = Sample("audio", "audio/ogg", media.encode_audio(sound, RATE, "ogg"))
    frames = media.video(4, 64, 64)
    films = {
        "mp4": Sample("video", "video/mp4", media.encode_video(frames, 4, media.sound(1.0))),
        "webm": Sample("video", "video/webm", _film("libvpx-vp9", "webm", frames)),
        "avi": Sample("video", "video/avi", _film("mpeg4", "avi", frames)),
        "mpegts": Sample("video", "video/mp2t", _film("mpeg2video", "mpegts", frames)),
    }
    return pictures | sounds | films


def frame_list(pictures: list[bytes]) -> str:
    """vLLM's video of separate pictures, as a data URL."""
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(p).decode() for p in pictures)


def mutate(data: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """The file damaged in one to three ways."""
    for _ in range(rng.integers(1, 4)):
        ways = (_flip, _flip, _set_integer, _set_integer, _truncate, _repeat, _remove, _zero)
        way: Callable[[bytearray, np.random.Generator], None] = ways[rng.integers(len(ways))]
        damaged = bytearray(data)
        if damaged:
            way(damaged, rng)
        data = bytes(damaged)
    if rng.random() < 0.05:
        cut = int(rng.integers(0, len(data) + 1))
        data = data[:cut] + other[cut:]
    return data


def _place(data: bytearray, rng: np.random.Generator) -> int:
    """Anywhere, but as often in the head, where formats say what they are."""
    last = min(len(data), HEAD_BYTES) if rng.random() < 0.5 else len(data)
    return int(rng.integers(0, last))


def _flip(data: bytearray, rng: np.random.Generator) -> None:
    for _ in range(rng.integers(1, 9)):
        data[_place(data, rng)] ^= 1 << int(rng.integers(8))


def _set_integer(data: bytearray, rng: np.random.Generator) -> None:
    place, size = _place(data, rng), int(rng.choice([1, 2, 4]))
    number = INTEGERS[rng.integers(len(INTEGERS))] & (256**size - 1)
    order = ("big", "little")[rng.integers(2)]
    data[place : place + size] = number.to_bytes(size, order)


def _truncate(data: bytearray, rng: np.random.Generator) -> None:
    del data[_place(data, rng) :]


def _repeat(data: bytearray, rng: np.random.Generator) -> None:
    place, size = _place(data, rng), int(rng.integers(1, 65))
    data[place:place] = data[place : place + size] * int(rng.integers(1, 9))


def _remove(data: bytearray, rng: np.random.Generator) -> None:
    place = _place(data, rng)
    del data[place : place + int(rng.integers(1, 33))]


def _zero(data: bytearray, rng: np.random.Generator) -> None:
    place, size = _place(data, rng), int(rng.integers(1, 65))
    data[place : place + size] = bytes(len(data[place : place + size]))


def _picture(format: str, frames: int) -> bytes:
    buffer = io.BytesIO()
    first, *rest = (media.image(40, 30, seed) for seed in range(frames))
    animated = {"save_all": True, "append_images": rest} if rest else {}
    first.save(buffer, format, **animated)
    return buffer.getvalue()


def _film(codec: str, container: str, frames: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=8)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def blank(width: int, height: int, format: str = "PNG") -> bytes:
    """A picture of one colour: few bytes for many pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, format)
    return buffer.getvalue()
