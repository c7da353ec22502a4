# SPDX-License-Identifier: Apache-2.0
"""Dia through `AsyncOmni` against transformers' `generate` and `DiaProcessor`, greedily (I-17)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity import speaking
from tests.parity.harness import BLOCK, counted, deployment, speech_config
from tests.parity.speaking import assert_same
from tests.reference.dia import LONGEST_DELAY, Answer, HFDia
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FRAME = 512
REACH = 10
"""Frames after its own that a sample depends on."""
RATE = 44_100
MARGIN = 1e-4
MAX_ROWS = 56
CONFIG = speech_config("dia.yaml")
BYTES_PER_TOKEN = 2 * 2 * 4 * 32 * 4
"""Layers, keys and values, heads of both streams, head size, float32: of the tiny checkpoint."""
# So small that sixteen requests preempt each other.
CONFIG["stages"][0] |= {
    "max_model_len": 8 * BLOCK,
    "kv_cache_memory_bytes": 24 * BLOCK * BYTES_PER_TOKEN,
}


@dataclass(frozen=True)
class Case:
    """Something to say, maybe after a recording."""

    text: str
    recording: tuple[int, str] | None = None
    guidance: float = 3.0

    @property
    def samples(self) -> np.ndarray | None:
        return None if self.recording is None else sound(1.01, RATE, self.recording[0])

    @property
    def request(self) -> SpeechRequest:
        if self.recording is None:
            return SpeechRequest(text=self.text)
        heard = Reference(self.samples, RATE, self.recording[1])
        return SpeechRequest(text=self.text, references=(heard,))

    @property
    def params(self) -> dict[str, Any]:
        guided = {"subtalker_sampling_params": {"guidance_scale": self.guidance}}
        extra = {} if self.guidance == 3.0 else {"extra_args": guided}
        return {"temperature": 0, "max_tokens": MAX_ROWS, **extra}

    def said(self, reference: HFDia) -> Answer:
        before = "" if self.recording is None else f"{self.recording[1]} "
        return reference.say(before + self.text, self.samples, MAX_ROWS, self.guidance)


CASES = (
    Case("[S1] Hello."),
    Case("[S1] Good morning. [S2] Grüße!"),
    Case("[S2] Yes", guidance=1.0),
    Case("[S1] And more.", recording=(2, "[S1] Said before.")),
)


@dataclass
class Speaker(speaking.Speaker):
    """A deployment, and what transformers makes of the cases."""

    answers: tuple[Answer, ...]

    def case(self, index: int, **params: Any) -> tuple[SpeechRequest, dict[str, Any]]:
        return CASES[index].request, {**CASES[index].params, **params}

    def assert_said(self, index: int, made: np.ndarray) -> None:
        """What was cut off is compared where it does not depend on rows in which the reference,
        which knows the limit, has begun to end it."""
        answer = self.answers[index]
        assert len(made) >= len(answer.sound)
        if answer.ended:
            assert_same(made, answer.sound)
        else:
            sure = (answer.frames - LONGEST_DELAY - REACH) * FRAME
            assert_same(made[:sure], answer.sound[:sure])


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Speaker]:
    model = tiny_checkpoint("dia")
    # The engines first: they are forked from this process.
    with deployment(model, deploy_config=CONFIG) as running:
        reference = HFDia(model)
        yield Speaker(running, tuple(case.said(reference) for case in CASES))


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape != other.shape or not np.allclose(one, other, atol=0.01)


def test_the_cases_are_telling(speaker: Speaker) -> None:
    """Speech ends by itself or is cut off, and rounding decides nothing."""
    assert {answer.ended for answer in speaker.answers} == {True, False}
    assert min(answer.margin for answer in speaker.answers) > MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is transformers', alone and among sixteen (for which there is too little memory at
    once), streamed in growing windows; guidance is each request's own."""
    windows = []
    for index in range(len(CASES)):
        pieces = speaker.running.run(speaker.pieces(*speaker.case(index)))
        speaker.assert_said(index, np.concatenate(pieces))
        windows.append([len(piece) // FRAME for piece in pieces])
    assert max(windows, key=sum)[:3] == [4, 8, 16]
    order = [i % len(CASES) for i in range(16)]
    together = speaker.say(*(speaker.case(index) for index in order))
    for index, made in zip(order, together, strict=True):
        speaker.assert_said(index, made)


def test_text_recordings_and_guidance_matter(speaker: Speaker) -> None:
    """Each decides what is made; the same again is the same, and the cache of recordings changes
    no sample. A text without a speaker is the first one's."""
    request, params = speaker.case(3, max_tokens=30)
    (heard,) = request.references
    unguided = {"extra_args": {"subtalker_sampling_params": {"guidance_scale": 1.0}}}
    asked = [
        (request, params),
        (replace(request, references=(replace(heard, samples=sound(1.01, RATE, 3)),)), params),
        (replace(request, references=(replace(heard, text="[S1] Other words."),)), params),
        (replace(request, references=()), params),
        (replace(request, text="[S1] And less."), params),
        (request, {**params, **unguided}),
    ]
    sounds = speaker.say(*asked, (replace(request, references=(), text="And more."), params))
    assert_same(sounds.pop(), sounds[3])
    hits = counted("prefix_cache_hits")
    (again,) = speaker.say(asked[0])
    assert counted("prefix_cache_hits") > hits, "what was computed of the text serves again"
    assert_same(again, sounds[0])
    for index, one in enumerate(sounds):
        assert all(differ(one, another) for another in sounds[:index])


def test_a_seed_decides_whatever_the_company_is(speaker: Speaker) -> None:
    drawn = {"temperature": 1.8, "top_k": 45, "top_p": 0.9, "seed": 5, "max_tokens": 24}
    asked = (CASES[0].request, drawn)
    (alone,) = speaker.say(asked)
    among, *_ = speaker.say(asked, (CASES[0].request, {**drawn, "seed": 6}), speaker.case(1))
    assert_same(among, alone)
    assert differ(alone, speaker.answers[0].sound[: len(alone)])


def test_speech_of_any_length(speaker: Speaker) -> None:
    """One frame, or none at all (A-65, A-68)."""
    one, none = speaker.say(speaker.case(0, max_tokens=16), speaker.case(0, max_tokens=15))
    assert one.shape == (FRAME,)
    assert not len(none)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpeechRequest(text="Hi", voice="nobody"), "voice"),
        (SpeechRequest(text="?!"), "text"),
        (SpeechRequest(text="Hi", instructions="Whisper."), "instructions"),
        (SpeechRequest(text="Hi", references=(Reference(sound(2.0), 16_000),)), "references.text"),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(64)), "speaker_embedding"),
        (SpeechRequest(text="[S1] Hi. [S3] Hi."), "text"),
        (SpeechRequest(text="word " * 205), "text"),
        (replace(CASES[3].request, text="word " * 203), "text"),
    ],
)
def test_what_cannot_be_said(speaker: Speaker, request_: SpeechRequest, field: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        speaker.say((request_, {}))
    assert refused.value.param == field
