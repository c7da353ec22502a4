# SPDX-License-Identifier: Apache-2.0
"""What a client may send: real files decode, everything else is a quick OmniClientError."""

import io
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vllm_omni.errors import OmniClientError
from vllm_omni.media.audio_encode import AudioStreamEncoder, encode
from vllm_omni.media.decode import (
    check_audio,
    check_image,
    check_video,
    decode_audio,
    decode_image,
    decode_video,
)
from vllm_omni.media.limits import MediaLimits
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
ALL = (check_audio, decode_audio, check_image, decode_image, check_video, decode_video)
AUDIO, IMAGE, VIDEO = ALL[:2], ALL[2:4], ALL[4:]

SOUND = media.sound(0.5, 24_000)
WAV = encode(SOUND, 24_000, "wav")
PICTURE = media.image(40, 30)
PNG = media.encode_image(PICTURE)
FRAMES = media.video(10, 64, 48)
MP4 = media.encode_video(FRAMES, 4, media.sound(2.5), 16_000)
SILENT_MP4 = media.encode_video(FRAMES, 4)


def picture_file(format: str, picture: Image.Image = PICTURE, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def video_file(codec: str, container: str, sizes: list[tuple[int, int]]) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=8)
        stream.width, stream.height = sizes[0]
        stream.pix_fmt = "yuv420p"
        for index, (width, height) in enumerate(sizes):
            pixels = np.full((height, width, 3), index * 20, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def refused(function: Callable, data: bytes, limits: MediaLimits | None = None) -> str:
    """The message with which `data` is refused; it names the field, and comes soon."""
    start = time.process_time()
    with pytest.raises(OmniClientError) as raised:
        function(data, limits or MediaLimits(), param="messages.0.content")
    assert time.process_time() - start < 2
    assert raised.value.param == "messages.0.content"
    assert raised.value.status_code == 400
    assert raised.value.message.startswith("messages.0.content: ")
    return raised.value.message


def test_audio() -> None:
    info = check_audio(WAV)
    assert (info.seconds, info.rate, info.channels) == (0.5, 24_000, 1)
    samples, rate = decode_audio(WAV)
    assert (samples.dtype, samples.shape, rate) == (np.float32, (12_000,), 24_000)
    np.testing.assert_allclose(samples, SOUND, atol=1e-4)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_audio_sample_formats(subtype: str) -> None:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, SOUND, 24_000, format="WAV", subtype=subtype)
    samples, _ = decode_audio(buffer.getvalue())
    np.testing.assert_allclose(samples, SOUND, atol=0.02)


def test_channels_are_averaged_or_kept() -> None:
    stereo = np.stack([SOUND, 0.5 * SOUND], axis=1)
    data = encode(stereo, 24_000, "flac")
    mono, _ = decode_audio(data)
    both, _ = decode_audio(data, mono=False)
    np.testing.assert_allclose(mono, 0.75 * SOUND, atol=1e-4)
    np.testing.assert_allclose(both, stereo, atol=1e-4)


@pytest.mark.parametrize("function", AUDIO)
def test_audio_limits(function: Callable) -> None:
    ok = MediaLimits(max_audio_seconds=0.5, max_audio_rate=24_000, max_audio_channels=1)
    assert function(WAV, ok)
    assert "0.5 seconds" in refused(function, WAV, MediaLimits(max_audio_seconds=0.4))
    assert "24000 samples per s" in refused(function, WAV, MediaLimits(max_audio_rate=16_000))
    assert "1 channels" in refused(function, WAV, MediaLimits(max_audio_channels=0))
    assert f"{len(WAV)} bytes" in refused(function, WAV, MediaLimits(max_bytes=100))
    if function is decode_audio:
        assert "48000 bytes" in refused(function, WAV, MediaLimits(max_decoded_bytes=47_999))


def claimed(hours: int) -> bytes:
    """A FLAC file of one second whose header claims that many hours."""
    data = bytearray(encode(np.zeros(24_000, np.float32), 24_000, "flac"))
    samples = hours * 3600 * 24_000
    data[21] = data[21] & 0xF0 | samples >> 32
    data[22:26] = struct.pack(">I", samples & 0xFFFFFFFF)
    return bytes(data)


@pytest.mark.parametrize("function", AUDIO)
def test_ten_hours_claimed(function: Callable) -> None:
    assert "36000 seconds" in refused(function, claimed(10))


@pytest.mark.parametrize("function", AUDIO)
def test_silence_is_a_bomb(function: Callable) -> None:
    """700 s in 90 KB, with a header that says so and one that says nothing."""
    silence = np.zeros(24_000 * 700, np.float32)
    encoder = AudioStreamEncoder("flac", 24_000)
    for data in (encode(silence, 24_000, "flac"), encoder.feed(silence) + encoder.finish()):
        assert len(data) < 200_000
        assert "seconds" in refused(function, data)


@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.5, 1.0])
def test_short_vorbis_is_short(seconds: float) -> None:
    data = media.encode_audio(media.sound(seconds, 24_000), 24_000, "ogg")
    assert check_audio(data).seconds == pytest.approx(seconds, abs=0.05)


def test_a_sound_of_exactly_the_limit() -> None:
    """Its packets add up to 2.0000000000000013 s."""
    limits = MediaLimits(max_audio_seconds=2)
    assert check_audio(media.encode_audio(media.sound(2)), limits).seconds == pytest.approx(2)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 36_000 * 48_000, 0])
def test_wav_of_unknown_or_wrong_size_is_as_long_as_it_is(size: int) -> None:
    data = WAV[:40] + struct.pack("<I", size) + WAV[44:]
    assert check_audio(data).seconds == pytest.approx(0.5, abs=1e-3)
    assert len(decode_audio(data)[0]) == 12_000


def test_audio_of_a_video() -> None:
    samples, rate = decode_audio(MP4)
    assert rate == 16_000
    assert len(samples) / rate == pytest.approx(2.5, abs=0.13)
    assert "no audio" in refused(decode_audio, SILENT_MP4)


def test_cover_picture_is_not_a_video() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp3") as output:
        sound = output.add_stream("libmp3lame", rate=24_000, layout="mono")
        cover = output.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "yuvj420p"
        output.mux(cover.encode(av.VideoFrame.from_ndarray(FRAMES[0], format="rgb24")))
        output.mux(cover.encode(None))
        frame = av.AudioFrame.from_ndarray(SOUND[None], format="fltp", layout="mono")
        frame.sample_rate = 24_000
        output.mux(sound.encode(frame))
        output.mux(sound.encode(None))
    assert check_audio(buffer.getvalue()).rate == 24_000
    assert "no video" in refused(check_video, buffer.getvalue())


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_images(format: str) -> None:
    data = picture_file(format)
    info = check_image(data)
    assert (info.width, info.height, info.format) == (40, 30, format)
    decoded = np.asarray(decode_image(data).convert("RGB"), np.float32)
    assert np.abs(decoded - np.asarray(PICTURE)).mean() < 12


def test_images_keep_their_mode_and_stand_upright() -> None:
    alpha = PICTURE.convert("RGBA")
    assert decode_image(picture_file("PNG", alpha)).mode == "RGBA"
    exif = Image.Exif()
    exif[0x0112] = 6  # Rotated by a quarter.
    assert decode_image(picture_file("JPEG", PICTURE, exif=exif)).size == (30, 40)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("function", IMAGE)
def test_image_limits(function: Callable) -> None:
    assert function(PNG, MediaLimits(max_image_pixels=1200))
    assert "1200 pixels" in refused(function, PNG, MediaLimits(max_image_pixels=1199))
    assert "bytes" in refused(function, PNG, MediaLimits(max_bytes=100))
    for width, height in ((100_000, 100_000), (2**31 - 1, 1), (0, 5)):
        refused(function, png_claiming(width, height))


def test_truncated_image() -> None:
    for length in range(10, len(PNG) - 12, 97):
        refused(decode_image, PNG[:length])


@pytest.mark.parametrize("box", [b"pitm", b"iloc", b"av01", b"ispe"])
def test_damaged_avif(box: bytes) -> None:
    """Its reader raises bare RuntimeErrors."""
    refused(decode_image, picture_file("AVIF").replace(box, b"xxxx"))


@pytest.mark.parametrize(
    ("codec", "container"),
    [
        ("libx264", "mp4"),
        ("libvpx-vp9", "webm"),
        ("libvpx", "webm"),
        ("mpeg4", "avi"),
        ("mpeg2video", "mpegts"),
    ],
)
def test_video_formats(codec: str, container: str) -> None:
    video = decode_video(video_file(codec, container, [(64, 64)] * 9))
    assert video.frames.shape == (9, 64, 64, 3)
    assert video.fps == 8
    assert video.frames[:, 0, 0, 0] == pytest.approx(np.arange(9) * 20, abs=5)


def test_video_with_sound() -> None:
    info = check_video(MP4)
    assert (info.width, info.height, info.frames, info.fps) == (64, 48, 10, 4.0)
    assert info.has_audio
    video = decode_video(MP4)
    assert video.audio is not None
    assert video.audio_rate == 16_000
    assert np.abs(video.frames.astype(np.float32) - FRAMES).mean() < 12
    assert decode_video(SILENT_MP4).audio is None


def test_video_frames_are_spread_evenly() -> None:
    everything = decode_video(SILENT_MP4)
    some = decode_video(SILENT_MP4, max_frames=4)
    np.testing.assert_array_equal(some.frames, everything.frames[[0, 3, 6, 9]])
    assert some.fps == pytest.approx(1.6)
    assert len(decode_video(SILENT_MP4, max_frames=99).frames) == 10
    assert len(decode_video(SILENT_MP4, max_frames=1).frames) == 1


@pytest.mark.parametrize("function", VIDEO)
def test_video_limits(function: Callable) -> None:
    assert function(MP4, MediaLimits(max_video_pixels=64 * 48, max_video_frames=10))
    for limits, words in (
        (MediaLimits(max_video_pixels=64 * 48 - 1), "3072 pixels per frame"),
        (MediaLimits(max_video_frames=9), "10 frames"),
        (MediaLimits(max_video_seconds=2.4), "2.5 seconds"),
        (MediaLimits(max_video_total_pixels=64 * 48 * 10 - 1), "30720 pixels in all"),
        (MediaLimits(max_audio_rate=8000), "16000 samples per second"),
        (MediaLimits(max_audio_seconds=2), "seconds"),
    ):
        assert words in refused(function, MP4, limits)
    if function is decode_video:
        too_small = MediaLimits(max_decoded_bytes=64 * 48 * 3 * 10 - 1)
        assert "92160 bytes" in refused(function, SILENT_MP4, too_small)
        assert len(decode_video(SILENT_MP4, too_small, max_frames=9).frames) == 9


def test_frames_that_change_their_size() -> None:
    small, large = (video_file("mpeg2video", "mpegts", [size] * 6) for size in ((64, 64), (96, 96)))
    refused(decode_video, small + large)


def test_only_the_usual_codecs() -> None:
    assert "codec" in refused(check_video, video_file("ffv1", "matroska", [(64, 64)]))


@pytest.mark.parametrize("function", ALL)
def test_playlists_open_nothing(function: Callable, tmp_path: Path) -> None:
    path = tmp_path / "secret.wav"
    path.write_bytes(WAV)
    for playlist in (
        f"ffconcat version 1.0\nfile '{path}'\n",
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{path}\n#EXT-X-ENDLIST\n",
        f'<MPD type="static"><BaseURL>file://{path}</BaseURL></MPD>',
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\na={path}\n",
    ):
        refused(function, playlist.encode())


@pytest.mark.parametrize("function", ALL)
def test_nothing_and_the_wrong_thing(function: Callable) -> None:
    assert "is empty" in refused(function, b"")
    if function not in AUDIO:
        refused(function, WAV)
    if function not in IMAGE:
        refused(function, PNG)
    if function not in VIDEO:
        refused(function, SILENT_MP4)


SEEDS = [
    *(encode(SOUND, 24_000, format) for format in ("wav", "mp3", "flac", "opus", "aac")),
    *(picture_file(format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")),
    MP4,
    video_file("libvpx-vp9", "webm", [(64, 64)] * 3),
    video_file("mpeg4", "avi", [(64, 64)] * 3),
]


def survives(data: bytes) -> None:
    """Every function gives a result or an OmniClientError, in two seconds of our time."""
    for function in ALL:
        start = time.process_time()
        try:
            function(data)
        except OmniClientError as error:
            assert error.param in ("audio", "image", "video")
        assert time.process_time() - start < 2, function


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=4000))
def test_garbage(data: bytes) -> None:
    survives(data)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_damaged_files(data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(SEEDS)))
    head = data.draw(st.booleans())
    last = min(len(damaged), 200) - 1 if head else len(damaged) - 1
    for _ in range(data.draw(st.integers(0, 6))):
        damaged[data.draw(st.integers(0, last))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    survives(bytes(damaged))
