# SPDX-License-Identifier: Apache-2.0
"""CSM through `AsyncOmni` against transformers' `generate(output_audio=True)`, greedily (I-17)."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.harness import Deployment, deployment
from tests.reference.csm import RATE, Answer, HFCsm, Turn
from vllm_omni.speech.request import Reference, SpeechRequest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FRAME = 1920
# Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently.
TOLERANCE = 1e-4
MARGIN = 1e-3
MAX_FRAMES = 14
CONFIG = {
    "base_config": "csm.yaml",
    "platforms": {},
    "stages": [
        {
            "stage_id": 0,
            "devices": "cpu",
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 32 << 20,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
        },
        {"stage_id": 1, "devices": "cpu", "max_num_seqs": 16},
    ],
}
GREEDY = {
    "temperature": 0,
    "max_tokens": MAX_FRAMES,
}


@dataclass(frozen=True)
class Case:
    """Something to say, after what was said before."""

    speaker: str
    text: str
    turns: tuple[Turn, ...] = ()

    @property
    def request(self) -> SpeechRequest:
        return SpeechRequest(
            text=self.text,
            voice=self.speaker,
            references=tuple(Reference(turn.samples, RATE, turn.text) for turn in self.turns),
            extra={"speakers": [turn.speaker for turn in self.turns]} if self.turns else {},
        )


MONOLOGUE = (Turn("1", "Before.", 1.3, 2),)
DIALOGUE = (Turn("0", "One.", 1.0, 5), Turn("1", "Two.", 1.21, 6))
CASES = (
    Case("0", "Hello.", MONOLOGUE),
    Case("3", "Yes"),
    Case("2", "Please read this.", DIALOGUE),
    Case("2", "Good morning."),
)


@dataclass
class Speaker:
    """A deployment, and what transformers makes of the cases."""

    running: Deployment
    answers: tuple[Answer, ...]

    def say(self, *requests: SpeechRequest, **params: Any) -> list[np.ndarray]:
        """The sounds of requests that run at the same time."""

        async def one(request: SpeechRequest) -> np.ndarray:
            stages = [{**GREEDY, **params}, None]
            outputs = self.running.omni.generate(request, sampling_params_list=stages)
            pieces = [o.audio.samples async for o in outputs if o.audio is not None]
            return np.concatenate(pieces)

        async def together() -> list[np.ndarray]:
            return await asyncio.gather(*map(one, requests))

        return self.running.run(together())


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Speaker]:
    model = tiny_checkpoint("csm")
    # The engines first: they are forked from this process.
    with deployment(model, deploy_config=CONFIG) as running:
        reference = HFCsm(model)
        answers = [reference.say(c.speaker, c.text, c.turns, MAX_FRAMES) for c in CASES]
        yield Speaker(running, tuple(answers))


def assert_same(made: np.ndarray, expected: np.ndarray) -> None:
    assert made.shape == expected.shape
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)


def test_the_cases_are_telling(speaker: Speaker) -> None:
    """Each way that speech may end is among them, and rounding decides nothing."""
    ends = [answer.frames[-1] == 0 for answer in speaker.answers]
    assert any(end.all() for end in ends)
    assert any(end[:-1].all() and not end[-1] for end in ends)
    assert any(end.numel() and not end[0] for end in ends)
    assert min(answer.margin for answer in speaker.answers) > MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is transformers', alone and among sixteen, streamed in growing windows."""
    for case, answer in zip(CASES, speaker.answers, strict=True):
        (alone,) = speaker.say(case.request)
        assert_same(alone, answer.sound)
    order = [i % len(CASES) for i in range(16)]
    for i, made in zip(order, speaker.say(*(CASES[i].request for i in order)), strict=True):
        assert_same(made, speaker.answers[i].sound)
