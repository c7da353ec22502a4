# SPDX-License-Identifier: Apache-2.0
"""MP4 files that browsers play, of any size, with and without sound."""

import io
import json
import shutil
import subprocess
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vllm_omni.media.decode import check_video, decode_audio, decode_video
from vllm_omni.media.video_encode import VideoEncoder, encode_video, write_video
from vllm_omni.media.video_stills import (
    MAX_SPRITES,
    SPRITE_SIDE,
    THUMBNAIL_SIDE,
    spritesheet,
    thumbnail,
)
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


def picture_frames(count: int, height: int, width: int) -> np.ndarray:
    """Smooth colours that change from frame to frame."""
    rows, columns = np.mgrid[:height, :width]
    frames = [
        np.stack([rows * 2 + 9 * i, columns * 2, np.full_like(rows, 60 + 5 * i)], -1)
        for i in range(count)
    ]
    return np.stack(frames).clip(0, 255).astype(np.uint8)


def boxes(data: bytes) -> list[str]:
    """The names of an MP4's outermost boxes, in order."""
    names, place = [], 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        names.append(data[place + 4 : place + 8].decode())
        assert size >= 8
        place += size
    return names


@given(
    st.integers(1, 6),
    st.integers(1, 33),
    st.integers(1, 33),
    st.floats(1, 60),
    st.sampled_from([None, 0.0, 0.1, 0.7]),
    st.sampled_from([8_000, 16_000, 22_050, 24_001, 44_100, 48_000, 96_000]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_shape(
    count: int, height: int, width: int, fps: float, seconds: float | None, rate: int, stereo: bool
) -> None:
    audio = None if seconds is None else sound(max(seconds, 0.01), rate)[: int(seconds * rate)]
    if audio is not None and stereo:
        audio = np.stack([audio, -audio], 1)
    data = encode_video(picture_frames(count, height, width), fps, audio, rate)

    info = check_video(data)
    assert (info.width, info.height) == (width + width % 2, height + height % 2)
    assert (info.frames, info.codec) == (count, "h264")
    assert info.fps == pytest.approx(fps, rel=1e-2)
    assert info.has_audio == (audio is not None and len(audio) > 0)
    assert boxes(data)[:2] == ["ftyp", "moov"], "the index comes before the data"


def test_pictures_come_back() -> None:
    frames = picture_frames(8, 47, 63)
    video = decode_video(encode_video(frames, 24))
    assert video.frames.shape == (8, 48, 64, 3)
    error = np.abs(video.frames[:, :47, :63].astype(int) - frames)
    assert error.mean() < 3
    np.testing.assert_array_less(error.mean(axis=(0, 1, 2)), 4)  # no channel is off: BT.709


def test_sound_comes_back_and_keeps_time() -> None:
    rate = 44_100
    left, right = sound(2.0, rate, seed=1), sound(2.0, rate, seed=2)
    data = encode_video(picture_frames(48, 32, 32), 24, np.stack([left, right], 1), rate)
    samples, found = decode_audio(data, mono=False)
    assert found == rate
    for expected, decoded in ((left, samples[:, 0]), (right, samples[:, 1])):
        spectrum = np.fft.rfft(decoded, 1 << 18) * np.conj(np.fft.rfft(expected, 1 << 18))
        likeness = np.fft.irfft(spectrum) / (np.linalg.norm(expected) * np.linalg.norm(decoded))
        assert likeness.max() > 0.97
        # The encoder's delay is told by an edit list, which players (and FFmpeg) take off.
        assert min(int(likeness.argmax()), (1 << 18) - int(likeness.argmax())) <= 1
    assert check_video(data).seconds == pytest.approx(2.0, abs=0.05)


def test_ffprobe_agrees(tmp_path: Path) -> None:
    """By ffprobe where there is one, by its library through PyAV where not."""
    path = tmp_path / "video.mp4"
    write_video(path, picture_frames(10, 48, 64), 16, sound(0.5, 16_000), 16_000)
    if shutil.which("ffprobe"):
        command = ["ffprobe", "-v", "error", "-show_streams", "-of", "json", str(path)]
        video, audio = json.loads(subprocess.check_output(command))["streams"]
        pixels, profile = video["pix_fmt"], video["profile"]
        names, space = (video["codec_name"], audio["codec_name"]), video["color_space"]
    else:
        with av.open(str(path)) as container:
            context, other = (stream.codec_context for stream in container.streams)
            pixels, profile, names = context.pix_fmt, context.profile, (context.name, other.name)
            space = {1: "bt709"}[int(context.colorspace)]
    assert (pixels, profile, names, space) == ("yuv420p", "High", ("h264", "aac"), "bt709")


def test_a_long_video_is_made_in_bounded_memory(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3), np.uint8)
    process = psutil.Process()
    with VideoEncoder(tmp_path / "video.mp4", (64, 64), 24, audio_rate=8000) as encoder:
        for i in range(200):
            encoder.feed(frames)
            encoder.feed_audio(np.zeros(1333, np.float32))
            if i == 50:
                before = process.memory_info().rss
        grown = process.memory_info().rss - before
    assert grown < 200 * frames.nbytes / 2


def test_a_sound_that_never_comes_is_silence(tmp_path: Path) -> None:
    with VideoEncoder(tmp_path / "video.mp4", (8, 8), 24, audio_rate=48_000, channels=2) as encoder:
        encoder.feed(picture_frames(3, 8, 8))
    samples, _ = decode_audio((tmp_path / "video.mp4").read_bytes())
    assert not samples.any()


def test_what_is_no_video() -> None:
    frames = picture_frames(2, 8, 8)
    for bad, fps in ((frames[..., :2], 8), (frames[0], 8), (frames.astype(float), 8)):
        with pytest.raises(ValueError, match="frames are"):
            encode_video(bad, fps)
    for fps in (0, -1, float("nan"), 1e9):
        with pytest.raises(ValueError, match="fps"):
            encode_video(frames, fps)
    with pytest.raises(ValueError, match="at least one frame"):
        encode_video(frames[:0], 8)
    with pytest.raises(ValueError, match="channels"):
        encode_video(frames, 8, np.zeros((9, 3), np.float32), 8000)
    with pytest.raises(ValueError, match="sample rate"):
        encode_video(frames, 8, np.zeros(9, np.float32))


@pytest.mark.parametrize(("count", "columns", "rows"), [(3, 2, 2), (27, 5, 5)])
def test_stills(tmp_path: Path, count: int, columns: int, rows: int) -> None:
    path = tmp_path / "video.mp4"
    frames = picture_frames(count, 260, 520)
    write_video(path, frames, 24)
    first = Image.open(io.BytesIO(thumbnail(path)))
    assert (first.format, first.size) == ("WEBP", (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2))
    small = Image.fromarray(frames[0]).resize(first.size)
    assert np.abs(np.asarray(first.convert("RGB")).astype(int) - np.asarray(small)).mean() < 6
    sheet = Image.open(io.BytesIO(spritesheet(path)))
    assert sheet.size == (columns * SPRITE_SIDE, rows * SPRITE_SIDE // 2)
    assert columns * rows <= MAX_SPRITES
