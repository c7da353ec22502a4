# SPDX-License-Identifier: Apache-2.0
"""Synthetic media are deterministic and decode to what they say."""

import io

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


def test_pure_and_seeded() -> None:
    assert media.image(40, 30, 1).tobytes() == media.image(40, 30, 1).tobytes()
    assert media.image(40, 30, 1).tobytes() != media.image(40, 30, 2).tobytes()
    np.testing.assert_array_equal(media.sound(0.3, seed=1), media.sound(0.3, seed=1))
    assert not np.array_equal(media.sound(0.3, seed=1), media.sound(0.3, seed=2))
    frames = media.video(4, 40, 30, 1)
    assert frames.shape == (4, 30, 40, 3) and frames.dtype == np.uint8
    assert not np.array_equal(frames[0], frames[3])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000])
def test_sound_is_in_range(seed: int, rate: int) -> None:
    samples = media.sound(0.5, rate, seed)
    assert samples.shape == (rate // 2,) and samples.dtype == np.float32
    assert 0.05 < np.abs(samples).max() < 1


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_image_files(format: str) -> None:
    picture = media.image(40, 30, 1)
    decoded = Image.open(io.BytesIO(media.encode_image(picture, format)))
    assert decoded.size == (40, 30)
    if format == "png":
        assert decoded.tobytes() == picture.tobytes()


@pytest.mark.parametrize("format", ["wav", "flac", "ogg", "mp3"])
def test_audio_files(format: str) -> None:
    samples = media.sound(0.5)
    decoded, rate = soundfile.read(io.BytesIO(media.encode_audio(samples, 16_000, format)))
    assert rate == 16_000
    if format in ("wav", "flac"):
        np.testing.assert_allclose(decoded, samples, atol=1e-4)


def test_video_file_with_sound() -> None:
    frames = media.video(8, 64, 48)
    data = media.encode_video(frames, fps=4, audio=media.sound(2.0))
    with av.open(io.BytesIO(data)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == 8
    assert np.abs(np.stack(decoded).astype(int) - frames).mean() < 12
    with av.open(io.BytesIO(data)) as container:
        samples = sum(frame.samples for frame in container.decode(audio=0))
    assert samples >= 32_000


def test_video_file_without_sound() -> None:
    with av.open(io.BytesIO(media.encode_video(media.video(4, 64, 48)))) as container:
        assert not container.streams.audio


def test_data_url() -> None:
    assert media.data_url(b"abc", "png") == "data:image/png;base64,YWJj"
