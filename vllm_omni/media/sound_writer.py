# SPDX-License-Identifier: Apache-2.0
"""A sound that comes in pieces, as a client wants it: its tempo, its sample rate, its format."""

from collections.abc import Sequence

import numpy as np

from vllm_omni.media.audio_encode import AudioStreamEncoder, encode, file_rate
from vllm_omni.media.resample import ResampleStream
from vllm_omni.media.tempo import TempoStream


class SoundShaper:
    """Changes tempo and sample rate of mono sound; what comes out is ready to be encoded.

    Args:
        rate: Hz, of what is fed.
        wanted_rate: Hz, of what comes out; None for the same.
        tempo: How many times as fast, at the same pitch.
    """

    def __init__(self, rate: int, wanted_rate: int | None = None, tempo: float = 1.0) -> None:
        self.sample_rate = wanted_rate or rate
        self._tempo = None if tempo == 1.0 else TempoStream(rate, tempo)
        self._rate = None if self.sample_rate == rate else ResampleStream(rate, self.sample_rate)

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Add float32 ``[n]``; what is ready by now, perhaps nothing."""
        if self._tempo is not None:
            samples = self._tempo.feed(samples[:, None])[:, 0]
        return samples if self._rate is None else self._rate.feed(samples)

    def finish(self) -> np.ndarray:
        """The rest."""
        rest = np.zeros(0, np.float32)
        if self._tempo is not None:
            rest = self._tempo.finish()[:, 0]
        if self._rate is None:
            return rest
        return np.concatenate([self._rate.feed(rest), self._rate.finish()])


class SoundWriter:
    """One file, made piece by piece; every piece is ready to be sent. See `AudioStreamEncoder`.

    Args:
        format: Of `AUDIO_FORMATS`.
        rate: Hz, of what is fed.
        wanted_rate: Hz, of the file; None for the same.
        tempo: How many times as fast, at the same pitch.

    Attributes:
        sample_rate: Hz, that the file is played at.
    """

    def __init__(
        self, format: str, rate: int, wanted_rate: int | None = None, tempo: float = 1.0
    ) -> None:
        self._shaper = SoundShaper(rate, wanted_rate, tempo)
        rate = self._shaper.sample_rate
        self.sample_rate = file_rate(format, rate)
        self._encoder = AudioStreamEncoder(format, rate, param="response_format")

    def feed(self, samples: np.ndarray) -> bytes:
        """Add float32 ``[n]``; what is ready by now, perhaps nothing."""
        return self._encoder.feed(self._shaper.feed(samples))

    def finish(self) -> bytes:
        """The rest of the file."""
        return self._encoder.feed(self._shaper.finish()) + self._encoder.finish()


def whole_file(
    pieces: Sequence[np.ndarray],
    format: str,
    rate: int,
    wanted_rate: int | None = None,
    tempo: float = 1.0,
) -> tuple[bytes, int]:
    """One file with its true length in its header, and the rate it is played at. See
    `SoundWriter`."""
    shaper = SoundShaper(rate, wanted_rate, tempo)
    shaped = [shaper.feed(piece) for piece in pieces]
    samples = np.concatenate([*shaped, shaper.finish()])
    made = encode(samples, shaper.sample_rate, format, param="response_format")
    return made, file_rate(format, shaper.sample_rate)
