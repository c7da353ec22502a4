# SPDX-License-Identifier: Apache-2.0
"""Sounds in `multi_modal_data`: any rate is heard, and none that is no number reaches others."""

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.features.conftest import Client
from vllm_omni.errors import OmniClientError
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


async def heard(client: Client, audio: Any) -> list[int]:
    """Token ids of the answer to a sound."""
    content = [{"type": "audio"}, {"type": "text", "text": "what is it?"}]
    prompt = client.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = []
    async for output in client.omni.generate(
        {"prompt": prompt, "multi_modal_data": {"audio": audio}},
        SamplingParams(temperature=0, max_tokens=8),
    ):
        ids = list(output.outputs[0].token_ids)
    return ids


def test_any_rate_is_heard(client: Client) -> None:
    for rate in (8_000, 44_100, 48_000):
        assert client.running.run(heard(client, (media.sound(0.5, rate), rate)))


def test_sounds_that_are_the_same_are_heard_the_same(client: Client) -> None:
    sound = media.sound(0.5)
    answers = [
        client.running.run(heard(client, audio))
        for audio in (sound, (sound, 16_000), [(sound, 16_000)], np.stack([sound]))
    ]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_no_number_gets_through_that_is_none(client: Client, value: float) -> None:
    before = client.ask("hello").token_ids
    poison = np.full(8_000, value, np.float32)
    for audio in (poison, (poison, 44_100)):
        assert client.running.run(heard(client, audio))
    assert client.ask("hello").token_ids == before


def test_what_is_no_sound_is_the_callers_fault(client: Client) -> None:
    with pytest.raises(OmniClientError, match="sample rate"):
        client.running.run(heard(client, (media.sound(0.1), 0)))
