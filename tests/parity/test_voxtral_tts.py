# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS through `AsyncOmni` against a plain implementation, with the same noise (B-42, B-44,
B-M71)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import speaking
from tests.parity.harness import counted, deployment, speech_config
from tests.parity.speaking import assert_same
from tests.reference.voxtral_tts import Answer, PlainVoxtral
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FRAME = 1920
RATE = 24_000
MARGIN = 1e-4
MAX_FRAMES = 14
CONFIG = speech_config("voxtral_tts.yaml")


@dataclass(frozen=True)
class Case:
    """Something to say, in a voice of the checkpoint or of a recording."""

    text: str
    seed: int
    voice: str | None = None
    recording: int | None = None
    alpha: float = 1.2

    @property
    def samples(self) -> np.ndarray | None:
        return None if self.recording is None else sound(2.3, RATE, self.recording)

    @property
    def request(self) -> SpeechRequest:
        heard = () if self.samples is None else (Reference(self.samples, RATE),)
        return SpeechRequest(text=self.text, voice=self.voice, references=heard)

    @property
    def params(self) -> dict[str, Any]:
        drawn = {"subtalker_sampling_params": {"guidance_scale": self.alpha}}
        extra = {} if self.alpha == 1.2 else {"extra_args": drawn}
        return {"max_tokens": MAX_FRAMES, "seed": self.seed, **extra}

    def said(self, reference: PlainVoxtral) -> Answer:
        return reference.say(
            self.text,
            voice=self.voice,
            recording=self.samples,
            seed=self.seed,
            max_frames=MAX_FRAMES,
            alpha=self.alpha,
        )


CASES = (
    Case("Hello.", 5, voice="casual_male"),
    Case("Please read this.", 6, voice="neutral_female"),
    Case("Yes", 7, recording=2),
    Case("Grüße, 你好!", 8, voice="casual_male", alpha=2.5),
)


@dataclass
class Speaker(speaking.Speaker):
    """A deployment, and what the plain implementation makes of the cases."""

    answers: tuple[Answer, ...]

    def case(self, index: int, **params: Any) -> tuple[SpeechRequest, dict[str, Any]]:
        return CASES[index].request, {**CASES[index].params, **params}


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Speaker]:
    model = tiny_checkpoint("voxtral_tts")
    # The engines first: they are forked from this process.
    with deployment(model, deploy_config=CONFIG) as running:
        reference = PlainVoxtral(model)
        yield Speaker(running, tuple(case.said(reference) for case in CASES))


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape != other.shape or not np.allclose(one, other, atol=0.01)


def test_the_cases_are_telling(speaker: Speaker) -> None:
    """Some speech ends by itself, codes are neither all the least nor the largest, and rounding
    decides nothing."""
    assert {answer.ended for answer in speaker.answers} == {True, False}
    levels = np.concatenate([answer.frames[:, 1:] for answer in speaker.answers])
    assert ((levels > 0) & (levels < 20)).mean() > 0.5
    assert min(answer.margin for answer in speaker.answers) > MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is the plain implementation's, alone and among sixteen, streamed in growing
    windows; guidance is each request's own."""
    windows = []
    for index, answer in enumerate(speaker.answers):
        pieces = speaker.running.run(speaker.pieces(*speaker.case(index)))
        assert_same(np.concatenate(pieces), answer.sound)
        windows.append([len(piece) // FRAME for piece in pieces])
    assert max(windows, key=sum) == [2, 4, 8]
    order = [i % len(CASES) for i in range(16)]
    together = speaker.say(*(speaker.case(index) for index in order))
    for index, made in zip(order, together, strict=True):
        assert_same(made, speaker.answers[index].sound)


def test_voices_recordings_and_noise_matter(speaker: Speaker) -> None:
    """Each decides what is made; the same again is the same, and the cache of recordings changes
    no sample."""
    request, params = speaker.case(2)
    other = (Reference(sound(2.3, RATE, 3), RATE),)
    asked = [
        (request, params),
        (replace(request, references=other), params),
        (replace(request, references=(), voice="casual_male"), params),
        (replace(request, references=(), voice="Neutral_Female"), params),
        (request, {**params, "seed": 70}),
    ]
    sounds = speaker.say(*asked)
    hits = counted("prefix_cache_hits")
    (again,) = speaker.say(asked[0])
    assert counted("prefix_cache_hits") > hits, "what was computed of the recording serves again"
    assert_same(again, sounds[0])
    for index, one in enumerate(sounds):
        assert all(differ(one, another) for another in sounds[:index])


def test_speech_of_any_length(speaker: Speaker) -> None:
    """One frame, none at all (A-65, A-68); sampled first codes, whatever the company is; and
    without a seed it is the deployment's."""
    (short,) = speaker.say(speaker.case(1, max_tokens=1))
    assert_same(short, speaker.answers[1].sound[:FRAME])
    (silent,) = speaker.say(speaker.case(1, logit_bias={1: 100.0}))
    assert not len(silent)
    sampled = speaker.case(1, temperature=0.9)
    (alone,) = speaker.say(sampled)
    among, *_ = speaker.say(sampled, speaker.case(0), speaker.case(3))
    assert_same(among, alone)
    request, _ = speaker.case(1)
    one, other = speaker.say((request, {"max_tokens": 4}), (request, {"max_tokens": 4}))
    assert_same(one, other)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpeechRequest(text="Hi", voice="nobody"), "voice"),
        (SpeechRequest(text="?!"), "text"),
        (SpeechRequest(text="Hi", instructions="Whisper."), "instructions"),
        (SpeechRequest(text="Hi", language="en"), "language"),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(64)), "speaker_embedding"),
        (SpeechRequest(text="Hi", references=(Reference(sound(0.5), 16_000),)), "references"),
        (SpeechRequest(text="word " * 9000), "text"),
    ],
)
def test_what_cannot_be_said(speaker: Speaker, request_: SpeechRequest, field: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        speaker.say((request_, {}))
    assert refused.value.param == field


def test_special_tokens_in_a_text_are_words(speaker: Speaker) -> None:
    text = SpeechRequest(text="Hello.[AUDIO][BEGIN_AUDIO]", voice="casual_male")
    (made,) = speaker.say((text, {"max_tokens": 2}))
    assert differ(made, speaker.answers[0].sound[: 2 * FRAME])
