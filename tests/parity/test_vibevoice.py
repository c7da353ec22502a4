# SPDX-License-Identifier: Apache-2.0
"""VibeVoice through `AsyncOmni` against transformers' `generate`, with the same noise (A-70, I-17).

Every frame is fed back, as what it is and as what it sounds like: one wrong latent and all the
sound after it is another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import VibeVoiceForConditionalGeneration

from tests.parity import speaking
from tests.parity.harness import BLOCK, counted, deployment, speech_config
from tests.parity.speaking import assert_same
from tests.reference.vibevoice import RATE, Answer, HFVibeVoice, Line
from vllm_omni.errors import OmniClientError
from vllm_omni.models.denoising import GuidedDenoising
from vllm_omni.pipelines.vibevoice import Turn, turns
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FRAME = 3200
MARGIN = 1e-3
MAX_TOKENS = 24
CONFIG = speech_config("vibevoice.yaml")
BYTES_PER_TOKEN = 2 * 2 * 2 * 64 * 4
"""Layers, keys and values, heads of both streams, head size with marks, float32."""
# So small that requests preempt each other.
CONFIG["stages"][0] |= {
    "max_model_len": 8 * BLOCK,
    "kv_cache_memory_bytes": 20 * BLOCK * BYTES_PER_TOKEN,
}


@dataclass(frozen=True)
class Case:
    """Something to say, with the seed of its noise."""

    lines: tuple[Line, ...]
    seed: int

    @property
    def request(self) -> SpeechRequest:
        heard = [line for line in self.lines if line.seconds]
        script = "\n".join(f"Speaker {line.speaker}: {line.text}" for line in self.lines)
        (first, *others) = self.lines
        return SpeechRequest(
            text=script if others else first.text,
            voice=first.speaker,
            references=tuple(Reference(line.samples, RATE) for line in heard),
        )

    @property
    def params(self) -> dict[str, Any]:
        return {"max_tokens": MAX_TOKENS, "seed": self.seed}


CASES = (
    Case((Line("0", "Hello."),), 1),
    Case((Line("1", "Good morning.", 1.3, 2),), 2),
    Case((Line("0", "One.", 1.0, 5), Line("1", "Two.", 1.21, 6)), 1),
    Case((Line("2", "Please read this."),), 1),
)


@dataclass
class Speaker(speaking.Speaker):
    """A deployment, and what transformers makes of the cases."""

    reference: HFVibeVoice
    answers: tuple[Answer, ...]


@pytest.fixture(scope="module")
def speaker(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Speaker]:
    model = tiny_checkpoint("vibevoice")
    # The engines first: they are forked from this process.
    with deployment(model, deploy_config=CONFIG) as running:
        reference = HFVibeVoice(model)
        answers = [reference.say(case.lines, case.seed, MAX_TOKENS) for case in CASES]
        yield Speaker(running, reference, tuple(answers))


def test_the_cases_are_telling(speaker: Speaker) -> None:
    """Speech ends by itself, stretches of sound do within it, and rounding decides nothing."""
    config = speaker.reference.model.config
    said = [answer.tokens for answer in speaker.answers]
    assert any(tokens[-1] == config.eos_token_id for tokens in said)
    assert any(tokens[-1] != config.eos_token_id for tokens in said)
    again = [config.audio_token_id, config.audio_eos_token_id, config.audio_bos_token_id]
    assert any(again == tokens[i : i + 3] for tokens in said for i in range(len(tokens)))
    assert min(answer.margin for answer in speaker.answers) > MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is transformers', alone and among sixteen, streamed in growing windows."""
    for case, answer in zip(CASES, speaker.answers, strict=True):
        (alone,) = speaker.say((case.request, case.params))
        assert_same(alone, answer.sound)
    pieces = speaker.running.run(speaker.pieces(CASES[3].request, CASES[3].params))
    assert [len(piece) // FRAME for piece in pieces][:4] == [1, 2, 4, 8]
    order = [i % len(CASES) for i in range(16)]
    asked = [(CASES[i].request, CASES[i].params) for i in order]
    for i, made in zip(order, speaker.say(*asked), strict=True):
        assert_same(made, speaker.answers[i].sound)


def test_what_is_shared_changes_nothing(speaker: Speaker) -> None:
    """Requests that begin alike share what was computed, and take turns with the little memory that
    there is."""
    for _ in range(2):
        hits = counted("prefix_cache_hits")
        (made,) = speaker.say((CASES[1].request, CASES[1].params))
        assert_same(made, speaker.answers[1].sound)
    assert counted("prefix_cache_hits") > hits
    end = speaker.reference.model.config.eos_token_id
    endless = {"max_tokens": 36, "logit_bias": {end: -100.0}, "seed": 1}
    asked = [(CASES[i].request, endless) for i in (0, 3)]
    alone = [speaker.say(each)[0] for each in asked]
    preemptions = counted("num_preemptions")
    for i, made in enumerate(speaker.say(*asked * 5)):
        assert_same(made, alone[i % 2])
    assert counted("num_preemptions") > preemptions


def test_latents_are_the_references(speaker: Speaker) -> None:
    """Of the same noise and conditions, several at once against one by one, and in memory of their
    own (A-70). The same network on more rows: only its sums are ordered otherwise."""
    model = speaker.reference.model
    generator = torch.Generator().manual_seed(3)
    wanted, unwanted = torch.randn(2, 5, model.config.text_config.hidden_size, generator=generator)
    noise = torch.randn(5, model.config.audio_config.hidden_size, generator=generator)
    settings, _ = model._prepare_generation_config(None)
    denoising = GuidedDenoising(settings.to_dict())
    head = model.model.diffusion_head
    with torch.inference_mode():
        made = denoising(head, wanted, unwanted, noise)
        kept = made.clone()
        for row, latents in enumerate(made):
            with mock.patch("torch.randn", lambda *_, row=row: noise[row].repeat(2, 1)):
                expected = VibeVoiceForConditionalGeneration._sample_audio_latent(
                    model,
                    wanted[row][None],
                    unwanted[row][None],
                    settings.noise_scheduler,
                    settings.num_diffusion_steps,
                    settings.guidance_scale,
                )
            torch.testing.assert_close(latents, expected[0, 0], rtol=1e-5, atol=1e-5)
        denoising(head, unwanted, wanted, noise)
    assert torch.equal(made, kept)


def test_a_recording_is_the_voice(speaker: Speaker) -> None:
    """Other recordings give other frames, the same one the same, and the cache of recordings
    changes no sample; another seed, another sound."""
    case = CASES[1]
    first = case.request
    asked = [
        (first, case.params),
        (replace(first, references=(Reference(sound(1.3, RATE, 9), RATE),)), case.params),
        (replace(first, references=()), case.params),
        (first, {**case.params, "seed": 77}),
    ]
    one, *others = speaker.say(*asked)
    (again,) = speaker.say((first, case.params))
    assert_same(one, again)
    for other in others:
        length = min(len(one), len(other))
        assert not np.allclose(one[:length], other[:length], atol=0.01)


def test_speech_of_any_length(speaker: Speaker) -> None:
    """One frame, and none at all (A-65)."""
    case, answer = CASES[3], speaker.answers[3]
    (short,) = speaker.say((case.request, {**case.params, "max_tokens": 1}))
    assert_same(short, answer.sound[:FRAME])
    end = speaker.reference.model.config.eos_token_id
    (silent,) = speaker.say((case.request, {**case.params, "logit_bias": {end: 100.0}}))
    assert not len(silent)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpeechRequest(text="Hi", voice="4"), "voice"),
        (SpeechRequest(text="?!", voice="1"), "text"),
        (SpeechRequest(text="Speaker 1:\nSpeaker 2: "), "text"),
        (SpeechRequest(text="Speaker 1: Hi.\nSpeaker 12: Hi."), "text"),
        (
            SpeechRequest(text="Hi", references=(Reference(sound(2.0), RATE, "a"),)),
            "references.text",
        ),
        (SpeechRequest(text="Hi", instructions="Whisper."), "instructions"),
        (SpeechRequest(text="Hi", references=(Reference(sound(2.0), RATE),) * 5), "references"),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(64)), "speaker_embedding"),
        (SpeechRequest(text="Hi", extra={"speakers": ["0"]}), "extra.speakers"),
        (SpeechRequest(text="word " * 9000), "text"),
    ],
)
def test_what_cannot_be_said(speaker: Speaker, request_: SpeechRequest, field: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        speaker.say((request_, {}))
    assert refused.value.param == field


def test_special_tokens_in_a_text_are_words(speaker: Speaker) -> None:
    """transformers' processor would look for a recording."""
    request = SpeechRequest(text="Hello.<|vision_pad|><|vision_end|>", voice="0")
    (made,) = speaker.say((request, {"max_tokens": 8, "seed": 1}))
    assert len(made) >= FRAME


def test_scripts() -> None:
    """Lines say who speaks; a line that does not goes on with the last."""
    script = "So.\nspeaker 1: One\ntwo?\nSpeaker 3 : \nSpeaker: no\nSpeaker 0: End."
    assert turns(script, "2") == [
        Turn("2", "So."),
        Turn("1", "One\ntwo?"),
        Turn("3", "\nSpeaker: no"),
        Turn("0", "End."),
    ]
    with pytest.raises(OmniClientError, match="a line is of speaker 9; this model has 0, 1, 2, 3"):
        turns("Speaker 0: Yes.\nSpeaker 9: no", "2")
