# SPDX-License-Identifier: Apache-2.0
"""Sounds as the served models hear them: the one door for samples from HTTP and from Python."""

import math

import numpy as np

from vllm_omni.errors import OmniClientError
from vllm_omni.media.limits import DEFAULT_LIMITS
from vllm_omni.media.resample import resample

SOUND_RATE = 16_000
"""Hz; what the feature extractors of the served families take."""


def as_heard(
    samples: np.ndarray, rate: float | None = None, *, param: str = "audio"
) -> tuple[np.ndarray, int]:
    """Finite mono float32 samples ``[n]`` in [-1, 1] at `SOUND_RATE`, and that rate.

    NaN and infinities become silence and full scale: left in, they would reach other requests
    through the KV cache. vLLM would resample with torchaudio, which a CPU installation lacks.

    Args:
        samples: ``[n]``, or ``[n, channels]`` or ``[channels, n]``, whose mean is taken; integers
            are scaled to [-1, 1].
        rate: Hz; None if it is `SOUND_RATE` already.
        param: What to blame.

    Raises:
        OmniClientError: This is no sound.
    """
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise OmniClientError(
            f"{param}: samples should be numbers in one or two dimensions, "
            f"not {samples.dtype} in {samples.ndim}",
            param=param,
        )
    rate = SOUND_RATE if rate is None else rate
    if not 1 <= rate <= DEFAULT_LIMITS.max_audio_rate:
        raise OmniClientError(
            f"{param}: the sample rate should be from 1 to {DEFAULT_LIMITS.max_audio_rate} Hz, "
            f"not {rate}",
            param=param,
        )
    if samples.dtype.kind in "iu":
        samples = _scaled(samples)
    if not samples.size:
        return np.zeros(0, np.float32), SOUND_RATE
    finite = np.nan_to_num(samples, nan=0.0, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0)
    if finite.ndim == 2:
        finite = finite.mean(axis=int(np.argmin(finite.shape)))
    sound = np.ascontiguousarray(finite, dtype=np.float32)
    if math.isclose(rate, SOUND_RATE):
        return sound, SOUND_RATE
    return resample(sound, rate, SOUND_RATE).clip(-1.0, 1.0), SOUND_RATE


def _scaled(samples: np.ndarray) -> np.ndarray:
    """PCM of any width as floating point."""
    info = np.iinfo(samples.dtype)
    middle = 0 if info.min < 0 else (info.max + 1) / 2
    return (samples.astype(np.float64) - middle) / (info.max + 1 - middle)
