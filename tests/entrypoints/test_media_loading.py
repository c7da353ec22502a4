# SPDX-License-Identifier: Apache-2.0
"""What is decoded here is what vLLM's own readers would give, where those survive."""

import base64
import re
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO

from tests.entrypoints.mutations import blank, frame_list, samples
from vllm_omni.entrypoints.openai.media_checks import CheckedIO
from vllm_omni.entrypoints.openai.media_loading import load_video
from vllm_omni.errors import OmniClientError
from vllm_omni.media.limits import DEFAULT_LIMITS
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

FILM = media.encode_video(media.video(40, 64, 48), 10, media.sound(4.0))


def video_io(loader: str = "qwen2_vl", **options: Any) -> VideoMediaIO:
    return VideoMediaIO(ImageMediaIO(), video_backend=loader, **options)


def turned(film: bytes, degrees: int) -> bytes:
    """The MP4 with a display matrix, as telephones write it."""
    a, b = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    one, whole = 1 << 16, 1 << 30
    matrix = struct.pack(">9i", a * one, b * one, 0, -b * one, a * one, 0, 0, 0, whole)
    (place,) = [found.end() + 40 for found in re.finditer(b"tkhd", film)][:1]
    return film[:place] + matrix + film[place + len(matrix) :]


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize(
    ("loader", "options"),
    [
        ("qwen2_vl", {}),
        ("qwen2_vl", {"fps": 5}),
        ("qwen3_vl", {}),
        ("opencv", {}),
        ("opencv", {"num_frames": 6}),
        ("opencv", {"num_frames": -1, "fps": 3}),
    ],
)
def test_videos_are_vllms(loader: str, options: dict[str, Any], degrees: int) -> None:
    silent = media.encode_video(media.video(40, 64, 48), 10)
    film = turned(silent, degrees) if degrees else silent
    frames, about = CheckedIO(video_io(loader, **options)).load_bytes(film)
    theirs, about_theirs = video_io(loader, **options).load_bytes(film)
    assert {**about_theirs, "video_backend": "pyav"} == about
    assert frames.shape == theirs.shape
    assert np.abs(frames.astype(np.float32) - theirs).mean() < 3


@pytest.mark.parametrize("name", ["wav", "flac", "mp3", "ogg"])
def test_sounds_are_vllms(name: str) -> None:
    data = samples()[name].data
    ours, rate = CheckedIO(AudioMediaIO()).load_bytes(data)
    theirs, _ = CheckedIO(AudioMediaIO(audio_backend="soundfile")).load_bytes(data)
    assert rate == 16_000
    size = min(len(ours), len(theirs))
    assert abs(len(ours) - len(theirs)) < 800
    assert np.abs(ours[:size] - theirs[:size]).max() < 0.02


def refused(io: MediaIO[Any], mime: str, text: str) -> str:
    with pytest.raises(OmniClientError) as caught:
        CheckedIO(io).load_base64(mime, text)
    assert caught.value.param == "messages"
    return caught.value.message


def test_a_list_of_frames_keeps_the_limits() -> None:
    def frames(*pictures: bytes) -> str:
        return frame_list(list(pictures)).partition(",")[2]

    small, mime = blank(64, 48), "video/jpeg"
    loaded, about = CheckedIO(video_io()).load_base64(mime, frames(*[small] * 3))
    assert loaded.shape == (3, 48, 64, 3)
    assert about["total_num_frames"] == 3
    assert "pixels" in refused(video_io(), mime, frames(small, blank(6000, 5000)))
    # Only as many as are asked for are looked at, and so are decoded.
    CheckedIO(video_io(num_frames=1)).load_base64(mime, frames(small, b"garbage"))
    everything = video_io(num_frames=-1)
    assert "4097 frames" in refused(everything, mime, "," * 4096)
    many = ",".join([frames(blank(3000, 3000))] * 90)
    assert "bytes" in refused(everything, mime, many)
    assert "same shape" in refused(video_io(), mime, frames(small, blank(32, 32)))
    assert "cannot read" in refused(video_io(), mime, frames(b"garbage"))


@pytest.mark.parametrize("io", [ImageMediaIO(), AudioMediaIO()])
def test_only_videos_are_lists_of_frames(io: MediaIO[Any]) -> None:
    text = base64.b64encode(b"garbage").decode()
    assert "cannot read" in refused(io, "video/jpeg", text)


def test_frames_that_would_fill_the_memory() -> None:
    limits = replace(DEFAULT_LIMITS, max_decoded_bytes=64 * 48 * 3 * 8)
    assert len(load_video(video_io(), FILM, limits).media[0]) == 8
    with pytest.raises(OmniClientError, match=r"decoded video .* bytes"):
        load_video(video_io(fps=4), FILM, limits)
    with pytest.raises(OmniClientError, match="pixels in all"):
        load_video(video_io(), FILM, replace(DEFAULT_LIMITS, max_video_total_pixels=10**5))


def test_a_file_that_ends_opencv() -> None:
    """A damaged AVI at which vLLM's own reader ends the process (OpenCV 5.0, in avio_seek)."""
    from tests.entrypoints.test_media_fuzz import request

    _, body = request(1689)
    url = body["messages"][0]["content"][0]["video_url"]["url"]
    frames, _ = CheckedIO(video_io()).load_base64("video/avi", url.partition(",")[2])
    assert len(frames)
