# SPDX-License-Identifier: Apache-2.0
"""Sounds of prompts that were written in Python: any rate, any form, never NaN."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni.entrypoints.sounds import has_sounds, with_sounds_as_heard
from vllm_omni.errors import OmniClientError
from vllm_omni.media.hearing import SOUND_RATE, as_heard
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SOUND = media.sound(0.5)


def heard(audio: Any) -> Any:
    prompt = {"prompt": "x", "multi_modal_data": {"audio": audio, "image": "kept"}}
    result = with_sounds_as_heard(prompt)
    assert prompt["multi_modal_data"]["audio"] is audio
    assert result["multi_modal_data"]["image"] == "kept"
    return result["multi_modal_data"]["audio"]


@pytest.mark.parametrize("rate", [1_000, 8_000, 16_000, 22_050, 44_100.0, 48_000])
def test_any_rate(rate: float) -> None:
    samples, out = heard((media.sound(0.5, round(rate)), rate))
    assert out == SOUND_RATE
    assert abs(len(samples) - 8_000) <= 1


@pytest.mark.parametrize(
    "samples",
    [
        SOUND,
        SOUND.astype(np.float64),
        np.stack([SOUND, SOUND]),
        np.stack([SOUND, SOUND], axis=1),
        (SOUND * 32_768).astype(np.int16),
        (SOUND * 128 + 128).astype(np.uint8),
        torch.from_numpy(SOUND),
        SOUND.tolist(),
    ],
)
def test_any_form(samples: Any) -> None:
    result, rate = heard((samples, SOUND_RATE))
    assert (result.dtype, result.ndim, rate) == (np.float32, 1, SOUND_RATE)
    np.testing.assert_allclose(result, SOUND, atol=0.01)


def test_one_or_several() -> None:
    for several in ([SOUND, (SOUND, SOUND_RATE)], np.stack([SOUND, SOUND]), [SOUND.tolist()] * 2):
        results = heard(several)
        assert len(results) == 2
        for samples, rate in results:
            assert rate == SOUND_RATE
            np.testing.assert_array_equal(samples, SOUND)
    for one in (SOUND, torch.from_numpy(SOUND), SOUND.tolist()):
        np.testing.assert_array_equal(heard(one)[0], SOUND)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_no_number_gets_through_that_is_none(dtype: type) -> None:
    limit = np.finfo(dtype).max
    odd = np.array([np.nan, np.inf, -np.inf, limit, -limit, 0.25], dtype)
    np.testing.assert_array_equal(as_heard(odd)[0], [0, 1, -1, 1, -1, 0.25])
    for rate in (8_000, 44_100):
        samples, _ = as_heard(np.tile(odd, 100), rate)
        assert np.isfinite(samples).all()
        assert np.abs(samples).max() <= 1


def test_what_is_no_sound() -> None:
    for samples, rate in (
        (SOUND, 0),
        (SOUND, -1),
        (SOUND, np.nan),
        (SOUND, 1e9),
        (SOUND.astype(complex), 16_000),
        (SOUND[None, None], 16_000),
        (np.array(["a"]), 16_000),
    ):
        with pytest.raises(OmniClientError) as caught:
            heard((samples, rate))
        assert caught.value.param == "multi_modal_data.audio"
    assert len(heard((SOUND[:0], 8_000))[0]) == 0


def test_what_vllm_knows_better_is_left_alone() -> None:
    embeddings = [torch.zeros(3, 4)]
    assert heard(embeddings)[0] is embeddings[0]
    assert heard([None]) == [None]
    for prompt in ("text", [1, 2], {"prompt": "x"}, {"prompt": "x", "multi_modal_data": None}):
        assert not has_sounds(prompt)
        assert with_sounds_as_heard(prompt) is prompt
