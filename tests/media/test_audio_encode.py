# SPDX-License-Identifier: Apache-2.0
"""Each audio format holds the sound it was given, whole and streamed."""

import io
import struct

import numpy as np
import pytest
import soundfile

from vllm_omni.errors import OmniClientError
from vllm_omni.media.audio_encode import (
    AUDIO_FORMATS,
    CONTENT_TYPES,
    AudioStreamEncoder,
    encode,
    to_int16,
)
from vllm_omni.media.decode import check_audio, decode_audio
from vllm_omni.media.resample import resample
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
RATE = 24_000
FILES = ("wav", "mp3", "flac", "opus", "aac")
LOSSLESS = ("wav", "flac")
# Seconds that a codec's frames may add: priming and padding, which ADTS and streamed MP3 keep.
SLACK = {"wav": 0.0, "flac": 0.0, "opus": 0.02, "aac": 2 * 1024 / RATE, "mp3": 1152 / RATE}


def stream(samples: np.ndarray, format: str, rate: int = RATE, chunk: int = 1920) -> bytes:
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    encoder = AudioStreamEncoder(format, rate, channels)
    pieces = [encoder.feed(samples[i : i + chunk]) for i in range(0, len(samples), chunk)]
    return b"".join([*pieces, encoder.finish()])


def likeness(original: np.ndarray, decoded: np.ndarray) -> float:
    """The highest normalised correlation over all shifts."""
    size = len(original) + len(decoded)
    spectrum = np.fft.rfft(decoded, size) * np.conj(np.fft.rfft(original, size))
    product = np.linalg.norm(original) * np.linalg.norm(decoded)
    return float(np.fft.irfft(spectrum, size).max() / product)


@pytest.mark.parametrize("make", [encode, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize("rate", [8_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("format", FILES)
def test_round_trip(format: str, rate: int, make) -> None:
    samples = sound(1.5, rate)
    data = encode(samples, rate, format) if make is encode else stream(samples, format, rate)
    decoded, decoded_rate = decode_audio(data)

    slack = SLACK[format] * max(1, RATE / rate)
    if format == "mp3" and make is stream:  # Without a header that tells, the delay stays.
        slack *= 2
    assert len(decoded) / decoded_rate == pytest.approx(1.5, abs=slack + 1e-3)
    if decoded_rate != rate:
        assert format == "opus"  # Opus is always played at 48 kHz.
        decoded = resample(decoded, decoded_rate, rate)
    assert likeness(samples, decoded) > 0.97


@pytest.mark.parametrize("format", FILES)
def test_same_sound_same_bytes(format: str) -> None:
    samples = sound(0.5, RATE)
    assert encode(samples, RATE, format) == encode(samples, RATE, format)
    assert stream(samples, format) == stream(samples, format)


@pytest.mark.parametrize("chunk", [1, 777, 1920, 100_000])
@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_keep_every_sample(format: str, chunk: int) -> None:
    samples = sound(0.1 if chunk == 1 else 0.7, RATE)
    expected = to_int16(samples)
    whole, _ = soundfile.read(io.BytesIO(encode(samples, RATE, format)), dtype="int16")
    np.testing.assert_array_equal(whole, expected)
    streamed, rate = decode_audio(stream(samples, format, chunk=chunk))
    np.testing.assert_array_equal(np.rint(streamed * 32768).astype(np.int16), expected)
    assert rate == RATE


@pytest.mark.parametrize("format", ["pcm", "pcm16"])
def test_pcm_is_bare_little_endian_samples(format: str) -> None:
    samples = np.array([0.0, 1.0, -1.0, 0.5], np.float32)
    expected = struct.pack("<4h", 0, 32767, -32767, 16384)
    assert encode(samples, RATE, format) == expected
    assert stream(samples, format, chunk=3) == expected


def test_wav_header_sizes() -> None:
    samples = sound(0.25, RATE)
    whole = encode(samples, RATE, "wav")
    assert struct.unpack_from("<4sI4s", whole) == (b"RIFF", len(whole) - 8, b"WAVE")
    assert struct.unpack_from("<4sI", whole, 36) == (b"data", len(whole) - 44)
    assert struct.unpack_from("<HHIIHH", whole, 20) == (1, 1, RATE, 2 * RATE, 2, 16)

    streamed = stream(samples, "wav")
    assert struct.unpack_from("<4sI4s", streamed) == (b"RIFF", 0xFFFFFFFF, b"WAVE")
    assert struct.unpack_from("<4sI", streamed, 36) == (b"data", 0xFFFFFFFF)
    assert streamed[44:] == whole[44:]
    assert streamed.count(b"RIFF") == 1


@pytest.mark.parametrize(
    ("format", "chunks"),
    [("wav", 1), ("pcm", 1), ("opus", 1), ("mp3", 2), ("aac", 2), ("flac", 2)],
)
def test_first_sound_comes_early(format: str, chunks: int) -> None:
    """What came out after that many chunks of 80 ms can be played."""
    encoder = AudioStreamEncoder(format, RATE)
    samples = sound(1.0, RATE)
    data = b"".join(encoder.feed(samples[i * 1920 : (i + 1) * 1920]) for i in range(chunks))
    if format == "pcm":
        assert data == to_int16(samples[:1920]).tobytes()
        return
    decoded, rate = decode_audio(data)
    assert len(decoded) / rate > 0.03
    encoder.finish()


@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_stereo(format: str) -> None:
    samples = np.stack([sound(0.5, 48_000, seed=1), sound(0.5, 48_000, seed=2)], axis=1)
    for data in (encode(samples, 48_000, format), stream(samples, format, 48_000)):
        if format.startswith("pcm"):
            assert data == to_int16(samples).tobytes()
            continue
        assert check_audio(data).channels == 2
        decoded, _ = decode_audio(data, mono=False)
        assert likeness(samples[:, 0], decoded[:, 0]) > 0.97
        assert likeness(samples[:, 1], decoded[:, 1]) > 0.97


@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_broken_samples_become_sound(format: str) -> None:
    samples = np.array([np.nan, np.inf, -np.inf, 7.0, -7.0] * 2000, np.float64)
    assert encode(samples, RATE, format)
    assert to_int16(samples)[:5].tolist() == [0, 32767, -32767, 32767, -32767]


@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_no_samples_at_all(format: str) -> None:
    encode(np.zeros(0, np.float32), RATE, format)
    encoder = AudioStreamEncoder(format, RATE)
    encoder.feed(np.zeros(0, np.float32))
    encoder.finish()
    assert encoder.finish() == b""
    with pytest.raises(RuntimeError, match="finished"):
        encoder.feed(np.zeros(1, np.float32))


def test_unknown_format_names_the_field_and_the_formats() -> None:
    samples = np.zeros(4, np.float32)
    with pytest.raises(OmniClientError, match="wav, mp3, flac, opus, aac, pcm") as raised:
        encode(samples, RATE, "ogg")
    assert (raised.value.param, raised.value.status_code) == ("audio.format", 400)
    with pytest.raises(OmniClientError) as raised:
        AudioStreamEncoder("WAV", RATE, param="response_format")
    assert raised.value.param == "response_format"


def test_misuse_is_not_the_clients_fault() -> None:
    with pytest.raises(TypeError, match="floating point"):
        encode(np.zeros(4, np.int16), RATE, "wav")
    for call in (
        lambda: encode(np.zeros((1, 2, 3), np.float32), RATE, "wav"),
        lambda: encode(np.zeros((4, 3), np.float32), RATE, "mp3"),
        lambda: encode(np.zeros(4, np.float32), 0, "mp3"),
        lambda: AudioStreamEncoder("wav", RATE).feed(np.zeros((4, 2), np.float32)),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert not isinstance(raised.value, OmniClientError)


def test_content_types() -> None:
    assert set(CONTENT_TYPES) == {"wav", "mp3", "flac", "opus", "aac", "pcm", "pcm16"}
    assert CONTENT_TYPES["mp3"] == "audio/mpeg"


@pytest.mark.parametrize("to_rate", [16_000, 24_000, 48_000])
def test_resample(to_rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE).astype(np.float32)
    result = resample(tone, RATE, to_rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(to_rate) / to_rate)
    assert result.dtype == np.float32
    assert len(result) == to_rate
    np.testing.assert_allclose(result[500:-500], expected[500:-500], atol=1e-3)
    stereo = resample(np.stack([tone, -tone], axis=1), RATE, to_rate)
    np.testing.assert_allclose(stereo[:, 0], -stereo[:, 1], atol=1e-6)
