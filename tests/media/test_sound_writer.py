# SPDX-License-Identifier: Apache-2.0
"""Sound that is shaped while it comes is the same as when it is shaped at once."""

import numpy as np
import pytest
import soxr

from vllm_omni.media.audio_encode import AUDIO_FORMATS
from vllm_omni.media.decode import decode_audio
from vllm_omni.media.sound_writer import SoundShaper, SoundWriter, whole_file
from vllm_omni.media.tempo import with_tempo

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
RATE = 24_000
SAMPLES = (np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE) / 2).astype(np.float32)


@pytest.mark.parametrize("pieces", [1, 7, 300])
@pytest.mark.parametrize(
    ("tempo", "rate"), [(1.0, None), (1.5, None), (0.3, 16_000), (1.0, 48_000)]
)
def test_in_pieces_as_at_once(pieces: int, tempo: float, rate: int | None) -> None:
    shaper = SoundShaper(RATE, rate, tempo)
    made = [shaper.feed(piece) for piece in np.array_split(SAMPLES, pieces)]
    found = np.concatenate([*made, shaper.finish()])
    expected = with_tempo(SAMPLES[:, None], RATE, tempo)[:, 0]
    if rate is not None:
        expected = soxr.resample(expected, RATE, rate)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert shaper.sample_rate == (rate or RATE)


@pytest.mark.parametrize("format", set(AUDIO_FORMATS) - {"pcm", "pcm16"})
def test_every_format_of_any_shape(format: str) -> None:
    writer = SoundWriter(format, RATE, 16_000, 2.0)
    data = b"".join(
        [*(writer.feed(piece) for piece in np.array_split(SAMPLES, 9)), writer.finish()]
    )
    whole, rate = whole_file([SAMPLES], format, RATE, 16_000, 2.0)
    # Opus is played at 48 kHz whatever it was made of.
    assert rate == writer.sample_rate == (48_000 if format == "opus" else 16_000)
    for file in (data, whole):
        samples, _ = decode_audio(file)
        assert np.abs(samples).max() > 0.3


def test_no_sound_is_a_file_without_any() -> None:
    data, _ = whole_file([], "wav", RATE, 16_000, 2.0)
    assert len(data) == 44
