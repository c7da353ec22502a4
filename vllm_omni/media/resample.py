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
