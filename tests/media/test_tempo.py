# SPDX-License-Identifier: Apache-2.0
"""Faster and slower, at the same pitch."""

import numpy as np
import pytest

from vllm_omni.media.tempo import with_tempo

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
RATE = 16_000


def tone(seconds: float, hertz: float, channels: int) -> np.ndarray:
    wave = np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)
    return np.repeat(wave[:, None].astype(np.float32) / 2, channels, axis=1)


@pytest.mark.parametrize("tempo", [0.25, 0.4, 0.5, 0.9, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("channels", [1, 2])
def test_length_changes_and_pitch_does_not(tempo: float, channels: int) -> None:
    made = with_tempo(tone(1.0, 440, channels), RATE, tempo)
    assert made.shape[1] == channels
    assert len(made) == pytest.approx(RATE / tempo, rel=0.1)
    spectrum = np.abs(np.fft.rfft(made[:, 0]))
    assert spectrum.argmax() * RATE / len(made) == pytest.approx(440, rel=0.03)


def test_as_it_is() -> None:
    samples = tone(0.1, 440, 1)
    assert with_tempo(samples, RATE, 1.0) is samples
    assert len(with_tempo(samples[:0], RATE, 2.0)) == 0
    for tempo in (0.1, 5.0, float("nan")):
        with pytest.raises(ValueError, match="tempo"):
            with_tempo(samples, RATE, tempo)


def test_what_is_too_short_to_be_heard_stays() -> None:
    samples = np.ones((3, 1), np.float32)
    assert with_tempo(samples, 16_000, 4.0) is samples
