# SPDX-License-Identifier: Apache-2.0
"""Change of sample rate."""

import numpy as np
import soxr


def resample(samples: np.ndarray, from_rate: float, to_rate: float) -> np.ndarray:
    """The same sound at another rate: floating point ``[n]`` or ``[n, channels]``, any length.

    The result has about ``n * to_rate / from_rate`` samples. Equal rates return the input.
    """
    if from_rate == to_rate:
        return samples
    return soxr.resample(samples, from_rate, to_rate)


class ResampleStream:
    """Mono sound that comes in pieces, at another rate. Not for use by two threads at once.

    Args:
        from_rate: Hz.
        to_rate: Hz.
    """

    def __init__(self, from_rate: float, to_rate: float) -> None:
        self._stream = soxr.ResampleStream(from_rate, to_rate, 1, dtype="float32")

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Add float32 ``[n]``; what is ready by now, perhaps nothing."""
        return self._stream.resample_chunk(np.ascontiguousarray(samples, np.float32))

    def finish(self) -> np.ndarray:
        """The rest."""
        return self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
