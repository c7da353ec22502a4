# SPDX-License-Identifier: Apache-2.0
"""Samples to audio files, whole or as a stream (OpenAI's speech and chat audio formats).

Samples are floating point in [-1, 1], of shape ``[n]`` (mono) or ``[n, channels]``. What lies
outside is clamped and NaN is silence, so that a faulty model makes a bad sound and no failed
request. wav, flac and pcm hold signed 16-bit samples.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

import av
import numpy as np

from vllm_omni.errors import OmniClientError

CONTENT_TYPES = MappingProxyType(
    {
        "wav": "audio/wav",
        "mp3": "audio/mpeg",
        "flac": "audio/flac",
        "opus": "audio/ogg",
        "aac": "audio/aac",
        "pcm": "audio/pcm",
        "pcm16": "audio/pcm",
    }
)
AUDIO_FORMATS = tuple(CONTENT_TYPES)

_UNKNOWN_SIZE = 0xFFFFFFFF
_WAV_HEADER_BYTES = 44
_BLOCK = 1 << 16  # Samples that go through an encoder at once.


class _Codec(NamedTuple):
    """How FFmpeg makes a format.

    Attributes:
        container: Name of the muxer.
        encoder: Name of the encoder.
        rates: Sample rates that the encoder takes, ascending; empty for any.
        bit_rate: Bits per second and channel that it never passes; 0 for lossless.
        bits_per_sample: Bits per sample that it does not pass either, for low rates.
        options: Options of the muxer.
    """

    container: str
    encoder: str
    rates: tuple[int, ...] = ()
    bit_rate: int = 0
    bits_per_sample: int = 4
    options: tuple[tuple[str, str], ...] = ()


_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
AAC_RATES = (*_MPEG_RATES, 64000, 88200, 96000)
"""Sample rates in Hz that the AAC encoder takes."""

OPUS_RATE = 48_000
LOSSLESS = frozenset({"wav", "flac", "pcm", "pcm16"})
"""Formats whose samples have a number of bits, which is 16."""

_CODECS = {
    "mp3": _Codec(
        "mp3", "libmp3lame", _MPEG_RATES, bit_rate=96_000, options=(("id3v2_version", "0"),)
    ),
    "flac": _Codec("flac", "flac", options=(("metadata_header_padding", "0"),)),
    # Left alone, the muxer collects a page of one second, and two of them.
    "opus": _Codec(
        "ogg",
        "libopus",
        (8000, 12000, 16000, 24000, 48000),
        bit_rate=64_000,
        bits_per_sample=8,
        options=(("page_duration", "20000"),),
    ),
    "aac": _Codec("adts", "aac", AAC_RATES, bit_rate=96_000),
}


def check_format(format: str, param: str = "audio.format") -> None:
    """Refuse a format that we do not make.

    Raises:
        OmniClientError: It names `param` and the formats there are.
    """
    if format not in CONTENT_TYPES:
        raise OmniClientError(
            f"{param}: unknown audio format {format!r}; use one of {', '.join(AUDIO_FORMATS)}",
            param=param,
        )


def to_int16(samples: np.ndarray) -> np.ndarray:
    """Signed 16-bit samples, of the same shape, of floating point ones in [-1, 1]."""
    samples = clean_samples(samples)
    return np.rint(samples * np.float32(32767)).astype("<i2")


def encode(samples: np.ndarray, rate: int, format: str, *, param: str = "audio.format") -> bytes:
    """One audio file.

    Args:
        samples: Floating point ``[n]`` or ``[n, channels]`` in [-1, 1].
        rate: Sample rate in Hz. A codec that does not know it gets the sound resampled to the
            next higher one that it knows.
        format: One of `AUDIO_FORMATS`; "opus" is in Ogg, "aac" in ADTS, "pcm" is bare
            little-endian samples.
        param: The request field that named the format, for the error.

    Raises:
        OmniClientError: Unknown format.
    """
    check_format(format, param)
    samples = np.asarray(samples)
    if format in ("wav", "pcm", "pcm16"):
        data = to_int16(samples).tobytes()
        header = _wav_header(rate, channels_of(samples), len(data)) if format == "wav" else b""
        return header + data
    sink = io.BytesIO()  # Seekable: the muxer puts the length into the header at the end.
    stream = _EncodedStream(_CODECS[format], rate, channels_of(samples), sink)
    stream.feed(samples)
    stream.close()
    return sink.getvalue()


class AudioStreamEncoder:
    """One audio file, made piece by piece; every piece is ready to be sent.

    A streamed WAV has one header with the sizes 0xFFFFFFFF, for "until the stream ends". Not for
    use by two threads at once.

    Args:
        format: One of `AUDIO_FORMATS`.
        rate: Sample rate in Hz of what is fed.
        channels: Channels of what is fed.
        param: The request field that named the format, for the error.

    Raises:
        OmniClientError: Unknown format.
    """

    def __init__(
        self, format: str, rate: int, channels: int = 1, *, param: str = "audio.format"
    ) -> None:
        check_format(format, param)
        self.format = format
        self.sample_rate = rate
        self.channels = channels
        self._sink = _Pipe()
        self._stream: _EncodedStream | None = None
        self._finished = False
        if format in _CODECS:
            self._stream = _EncodedStream(_CODECS[format], rate, channels, self._sink)
        elif format == "wav":
            self._sink.write(_wav_header(rate, channels, None))

    def feed(self, samples: np.ndarray) -> bytes:
        """Add samples (``[n]``, or ``[n, channels]``); what is ready by now, perhaps nothing."""
        if self._finished:
            raise RuntimeError("the audio stream is finished")
        samples = np.asarray(samples)
        if channels_of(samples) != self.channels:
            raise ValueError(
                f"samples of shape {samples.shape} in a {self.channels}-channel stream"
            )
        if self._stream is not None:
            self._stream.feed(samples)
        else:
            self._sink.write(to_int16(samples).tobytes())
        return self._sink.take()

    def finish(self) -> bytes:
        """The rest of the file. Calling it again gives nothing."""
        if not self._finished:
            self._finished = True
            if self._stream is not None:
                self._stream.close()
        return self._sink.take()


class _Pipe:
    """Where a muxer that cannot seek writes to."""

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


class _EncodedStream:
    """FFmpeg's encoder and muxer for one sound."""

    def __init__(self, codec: _Codec, rate: int, channels: int, sink: io.BytesIO | _Pipe) -> None:
        if rate <= 0 or channels not in (1, 2):
            raise ValueError(f"cannot encode {channels} channels at {rate} Hz")
        self._rate = rate
        self._layout = "mono" if channels == 1 else "stereo"
        self._lossless = codec.bit_rate == 0
        self._position = 0
        # `bitexact` leaves out serial numbers and versions: the same sound, the same bytes.
        options = {"fflags": "+bitexact", "flush_packets": "1", **dict(codec.options)}
        self._container = av.open(sink, "w", format=codec.container, container_options=options)
        stream = self._container.add_stream(codec.encoder, rate=encoder_rate(codec.rates, rate))
        stream.codec_context.layout = self._layout
        if self._lossless:
            stream.codec_context.format = "s16"
        else:
            per_channel = min(codec.bit_rate, codec.bits_per_sample * stream.rate)
            stream.codec_context.bit_rate = per_channel * channels
        stream.codec_context.flags |= av.codec.context.Flags.bitexact
        self._stream = stream

    def feed(self, samples: np.ndarray) -> None:
        for start in range(0, len(samples), _BLOCK):
            frame = self._frame(samples[start : start + _BLOCK])
            frame.sample_rate = self._rate
            frame.time_base = Fraction(1, self._rate)
            frame.pts = self._position
            self._position += frame.samples
            self._mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._position == 0:  # An encoder that got nothing at all cannot be flushed.
            self.feed(np.zeros((1, 2) if self._layout == "stereo" else 1, np.float32))
        self._mux(self._stream.encode(None))
        self._container.close()

    def _frame(self, samples: np.ndarray) -> av.AudioFrame:
        # Interleaved: one row of n * channels. Lossless: rounded here, as in WAV.
        converted = to_int16(samples) if self._lossless else clean_samples(samples)
        row = np.ascontiguousarray(converted).reshape(1, -1)
        return av.AudioFrame.from_ndarray(
            row, format="s16" if self._lossless else "flt", layout=self._layout
        )

    def _mux(self, packets: Iterable[av.Packet]) -> None:
        for packet in packets:
            self._container.mux(packet)


def clean_samples(samples: np.ndarray) -> np.ndarray:
    """Float32 samples within [-1, 1]."""
    if not np.issubdtype(samples.dtype, np.floating):
        raise TypeError(f"samples are floating point in [-1, 1], not {samples.dtype}")
    samples = np.nan_to_num(samples.astype(np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    return np.clip(samples, -1.0, 1.0, out=samples)


def channels_of(samples: np.ndarray) -> int:
    """Channels of ``[n]`` or ``[n, channels]``."""
    if samples.ndim not in (1, 2):
        raise ValueError(f"samples are [n] or [n, channels], not {list(samples.shape)}")
    return 1 if samples.ndim == 1 else samples.shape[1]


def encoder_rate(known: tuple[int, ...], rate: int) -> int:
    """The lowest known rate that keeps all of the sound, else the highest known."""
    if not known:
        return rate
    return next((each for each in known if each >= rate), known[-1])


def rates_of(format: str) -> tuple[int, ...]:
    """Sample rates in Hz that can be asked of a format, ascending; empty for any."""
    return _CODECS[format].rates if format in _CODECS else ()


def file_rate(format: str, rate: int) -> int:
    """The rate in Hz at which a file is played that was made of sound of some rate.

    Opus is, always, at 48 kHz (RFC 7845, section 5.1).
    """
    return OPUS_RATE if format == "opus" else encoder_rate(rates_of(format), rate)


def _wav_header(rate: int, channels: int, data_bytes: int | None) -> bytes:
    """RIFF header of 16-bit PCM; None for an unknown size."""
    fits = data_bytes is not None and data_bytes + _WAV_HEADER_BYTES <= _UNKNOWN_SIZE
    size = data_bytes if fits else _UNKNOWN_SIZE
    riff = data_bytes + _WAV_HEADER_BYTES - 8 if fits else _UNKNOWN_SIZE
    frame = 2 * channels
    layout = struct.pack("<HHIIHH", 1, channels, rate, rate * frame, frame, 16)
    return struct.pack(
        "<4sI4s4sI16s4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, layout, b"data", size
    )
