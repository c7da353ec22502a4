# SPDX-License-Identifier: Apache-2.0
"""Deterministic synthetic media. Every function is pure: the same arguments, the same bytes."""

from __future__ import annotations

import base64
import io
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

ImageFormat = Literal["png", "jpeg", "webp"]
AudioFormat = Literal["wav", "flac", "ogg", "mp3"]
MIME_TYPES = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "mp3": "audio/mpeg",
    "mp4": "video/mp4",
}


def image(width: int, height: int, seed: int = 0) -> Image:
    """An RGB picture of coloured discs on a gradient."""
    from PIL import Image as PILImage

    return PILImage.fromarray(_frame(width, height, np.random.default_rng(seed), shift=0.0))


def sound(seconds: float, rate: int = 16_000, seed: int = 0) -> np.ndarray:
    """A mono sound, float32 ``[round(seconds * rate)]`` in [-1, 1]: gliding tones and a beat."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    wave = np.zeros_like(time)
    for _ in range(3):
        start, end = np.exp(rng.uniform(np.log(100), np.log(min(5000, 0.4 * rate)), 2))
        glide = (end - start) / max(seconds, 1e-9)
        beat = 0.6 + 0.4 * np.sin(2 * np.pi * rng.uniform(1, 5) * time + rng.uniform(0, 6))
        level = rng.uniform(0.1, 0.25)
        wave += level * beat * np.sin(2 * np.pi * (start + glide * time / 2) * time)
    wave += 0.002 * rng.standard_normal(time.shape)
    return wave.astype(np.float32)


def video(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Moving discs, uint8 ``[frames, height, width, 3]`` (RGB)."""
    return np.stack(
        [
            _frame(width, height, np.random.default_rng(seed), shift=index / max(frames, 1))
            for index in range(frames)
        ]
    )


def encode_image(picture: Image, format: ImageFormat = "png") -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, format=format.upper())
    return buffer.getvalue()


def encode_audio(samples: np.ndarray, rate: int = 16_000, format: AudioFormat = "wav") -> bytes:
    """``samples``, float ``[n]`` or ``[n, channels]`` in [-1, 1], as a file (WAV is 16 bit PCM)."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=format.upper())
    return buffer.getvalue()


def encode_video(
    frames: np.ndarray,
    fps: int = 4,
    audio: np.ndarray | None = None,
    audio_rate: int = 16_000,
) -> bytes:
    """An MP4 (H.264, and AAC if ``audio`` is given) of uint8 ``[T, H, W, 3]`` frames.

    ``audio`` is mono float32 ``[n]``. Width and height must be even. H.264 is lossy: compare
    against the decoded file, not against ``frames``.
    """
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12", "threads": "1"}
        sound_stream = None
        if audio is not None:
            sound_stream = container.add_stream("aac", rate=audio_rate, layout="mono")
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if sound_stream is not None:
            block = av.AudioFrame.from_ndarray(
                np.ascontiguousarray(audio, dtype=np.float32)[None], format="fltp", layout="mono"
            )
            block.sample_rate = audio_rate
            block.pts = 0
            block.time_base = Fraction(1, audio_rate)
            container.mux(sound_stream.encode(block))
            container.mux(sound_stream.encode(None))
    return buffer.getvalue()


def data_url(data: bytes, format: str) -> str:
    """``data`` as a ``data:`` URL; ``format`` is a key of ``MIME_TYPES``."""
    return f"data:{MIME_TYPES[format]};base64,{base64.b64encode(data).decode()}"


def _frame(width: int, height: int, rng: np.random.Generator, shift: float) -> np.ndarray:
    """One picture, uint8 ``[height, width, 3]``; ``shift`` in [0, 1] moves the discs."""
    y, x = np.mgrid[0:height, 0:width] / np.array([[[max(height, 1)]], [[max(width, 1)]]])
    corner_a, corner_b = rng.uniform(0, 255, 3), rng.uniform(0, 255, 3)
    pixels = corner_a + ((x + y) / 2)[..., None] * (corner_b - corner_a)
    for _ in range(4):
        center, drift = rng.uniform(0, 1, 2), rng.uniform(-0.6, 0.6, 2)
        radius, color = rng.uniform(0.08, 0.3), rng.uniform(0, 255, 3)
        at = (center + shift * drift) % 1.0
        inside = (x - at[0]) ** 2 + (y - at[1]) ** 2 < radius**2
        pixels[inside] = color
    return pixels.round().astype(np.uint8)
