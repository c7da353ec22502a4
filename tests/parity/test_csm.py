# SPDX-License-Identifier: Apache-2.0
"""CSM through `AsyncOmni` against transformers' `generate(output_audio=True)`, greedily (I-17)."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.harness import BLOCK, Deployment, counted, deployment, speech_config
from tests.reference.csm import RATE, Answer, HFCsm, Turn
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FRAME = 1920
# Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently.
TOLERANCE = 1e-4
MARGIN = 1e-3
MAX_FRAMES = 14
CONFIG = speech_config("csm.yaml")
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, head size, float32: of the tiny checkpoint."""
# So small that requests preempt each other.
CONFIG["stages"][0] |= {
    "max_model_len": 5 * BLOCK,
    "kv_cache_memory_bytes": 7 * BLOCK * BYTES_PER_TOKEN,
}
GREEDY = {"temperature": 0, "max_tokens": MAX_FRAMES}


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

    async def pieces(self, request: SpeechRequest, **params: Any) -> list[np.ndarray]:
        """A sound as it is streamed."""
        stages = [{**GREEDY, **params}, None]
        outputs = self.running.omni.generate(request, sampling_params_list=stages)
        return [output.audio.samples async for output in outputs if output.audio is not None]

    def say(self, *requests: SpeechRequest, **params: Any) -> list[np.ndarray]:
        """The sounds of requests that run at the same time."""

        async def together() -> list[list[np.ndarray]]:
            return await asyncio.gather(*(self.pieces(each, **params) for each in requests))

        nothing = np.zeros(0, np.float32)
        return [np.concatenate([nothing, *pieces]) for pieces in self.running.run(together())]


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
    assert any(not end[0] for end in ends)
    assert min(answer.margin for answer in speaker.answers) > MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is transformers', alone and among sixteen, streamed in growing windows."""
    for case, answer in zip(CASES, speaker.answers, strict=True):
        (alone,) = speaker.say(case.request)
        assert_same(alone, answer.sound)
    pieces = speaker.running.run(speaker.pieces(CASES[3].request))
    assert [len(piece) // FRAME for piece in pieces] == [2, 4, 8]
    order = [i % len(CASES) for i in range(16)]
    for i, made in zip(order, speaker.say(*(CASES[i].request for i in order)), strict=True):
        assert_same(made, speaker.answers[i].sound)


PREEMPTION_ATTEMPTS = 4


def test_what_is_shared_changes_nothing(speaker: Speaker) -> None:
    """Requests that begin alike share what was computed, whatever they say then, and take turns
    with the little memory that there is."""
    asked = [CASES[i].request for i in (0, 2)]
    endless = {"max_tokens": 30, "logit_bias": {0: -100.0}}
    hits, preemptions = counted("prefix_cache_hits"), counted("num_preemptions")
    alone = [speaker.say(each, **endless)[0] for each in asked]
    for _ in range(PREEMPTION_ATTEMPTS):  # whether the memory runs out is a matter of timing
        for i, made in enumerate(speaker.say(*asked * 5, **endless)):
            assert_same(made, alone[i % 2])
        if counted("num_preemptions") > preemptions:
            break
    else:
        pytest.fail("there was memory for all")
    assert counted("prefix_cache_hits") > hits


def test_salts_keep_requests_apart(speaker: Speaker) -> None:
    salted = [replace(CASES[0].request, cache_salt=salt) for salt in ("one", "one", "two")]
    found, hits = [], counted("prefix_cache_hits")
    for request in salted:
        (made,) = speaker.say(request)
        assert_same(made, speaker.answers[0].sound)
        found.append(counted("prefix_cache_hits") - hits)
    assert found == [0, BLOCK, BLOCK]


def test_what_was_said_before_matters(speaker: Speaker) -> None:
    """Other recordings, or other speakers of them, give other frames; the same the same, and the
    cache of recordings changes no sample."""
    first = CASES[0].request
    (turn,) = MONOLOGUE
    asked = [
        first,
        replace(first, extra={}),
        replace(first, references=(Reference(sound(1.3, RATE, 9), RATE, turn.text),)),
        replace(first, references=(), extra={}),
    ]
    one, *others = speaker.say(*asked)
    (again,) = speaker.say(first)
    assert_same(one, again)
    for other in others:
        assert one.shape != other.shape or not np.allclose(one, other, atol=0.01)


def test_a_seed_decides_whatever_the_company_is(speaker: Speaker) -> None:
    request, *others = (case.request for case in reversed(CASES))
    seeded = {"temperature": 0.9, "seed": 5}
    (alone,) = speaker.say(request, **seeded)
    among, *_ = speaker.say(request, *others, **seeded)
    assert_same(among, alone)
    assert among.shape != speaker.answers[-1].sound.shape or not np.allclose(
        among, speaker.answers[-1].sound, atol=0.01
    )


def test_speech_of_any_length(speaker: Speaker) -> None:
    """One frame, none at all (A-65, A-68), and penalties, which see the ids that mean the end."""
    (short,) = speaker.say(CASES[3].request, max_tokens=1)
    assert_same(short, speaker.answers[3].sound[:FRAME])
    (silent,) = speaker.say(CASES[3].request, logit_bias={0: 100.0})
    assert not len(silent)
    speaker.say(CASES[3].request, repetition_penalty=1.2, presence_penalty=0.5)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpeechRequest(text="Hi", voice="10"), "voice"),
        (SpeechRequest(text="?!", voice="1"), "text"),
        (SpeechRequest(text="Hi", instructions="Whisper."), "instructions"),
        (SpeechRequest(text="Hi", references=(Reference(sound(2.0), 16_000),)), "references.text"),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(64)), "speaker_embedding"),
        (replace(CASES[0].request, x_vector_only=True), "x_vector_only"),
        (SpeechRequest(text="Hi", non_streaming=False), "non_streaming"),
        (SpeechRequest(text="Hi", extra={"speakers": ["0"]}), "extra.speakers"),
        (replace(CASES[0].request, extra={"speakers": "0"}), "extra.speakers"),
        (replace(CASES[0].request, extra={"speakers": ["x"]}), "extra.speakers"),
        (SpeechRequest(text="word " * 9000), "text"),
    ],
)
def test_what_cannot_be_said(speaker: Speaker, request_: SpeechRequest, field: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        speaker.say(request_)
    assert refused.value.param == field


def test_special_tokens_in_a_text_are_words(speaker: Speaker) -> None:
    """transformers' processor would look for a recording."""
    (made,) = speaker.say(SpeechRequest(text="Hello.<|AUDIO|><|audio_eos|>", voice="0"))
    assert len(made) >= FRAME
