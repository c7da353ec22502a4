# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v2 through `AsyncOmni` against transformers, greedily (B-M58, A-60, A-65).

Rows are transformers' own, generated here. Sound is what our codec makes of them in one go;
tests/diffusion holds it, and the prompts of recordings, to transformers' codec.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import HiggsAudioV2ForConditionalGeneration, HiggsAudioV2Processor

from tests.parity import speaking
from tests.parity.harness import Deployment, counted, deployment, speech_config
from tests.parity.speaking import assert_same
from vllm_omni.diffusion.programs import higgs_audio_v2
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniClientError
from vllm_omni.models.higgs_audio_codec import CodecDecoder
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FIXTURES = Path(__file__).parents[1] / "reference" / "fixtures" / "higgs_audio_v2"
RECORDED = json.loads((FIXTURES / "codec.json").read_text())
RATE = 24_000
GROUPS = 4
HOP = 960
MAX_TOKENS = 48
CONFIG = speech_config("higgs_audio_v2.yaml")
TEXTS = ("Hello, how are you?", "One, two, three.", "A", "Bonjour, ça va?", "你好，世界。")


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Deployment]:
    with deployment(tiny_checkpoint("higgs_audio_v2"), deploy_config=CONFIG) as started:
        yield started


class Expected:
    """What transformers makes of a prompt, as sound."""

    def __init__(self, model: Path) -> None:
        self.rows: list[torch.Tensor] = []
        self._model = HiggsAudioV2ForConditionalGeneration.from_pretrained(model).eval()
        # With it, transformers draws even where it is told to be greedy.
        self._model.generation_config.ras_win_len = None
        loaded = higgs_audio_v2.load(LoadContext(str(model), torch.device("cpu")))
        decoder = loaded.components["decoder"].module
        assert isinstance(decoder, CodecDecoder)
        self._decoder = decoder

    def __call__(self, prompt: dict[str, Any], max_tokens: int = MAX_TOKENS) -> np.ndarray:
        given: dict[str, Any] = {"input_ids": torch.tensor([prompt["input_ids"]])}
        if prompt["audio_input_ids"]:
            rows = torch.tensor([prompt["audio_input_ids"]])
            given |= {"audio_input_ids": rows, "audio_input_ids_mask": rows[..., 0] >= 0}
        made = self._model.generate(**given, max_new_tokens=max_tokens, do_sample=False)[0]
        made = made[len(prompt["audio_input_ids"]) :]
        self.rows.append(made)
        ended = bool((made[-1] == 1025).all())
        whole = made[1 : len(made) - ended]
        if len(whole) < GROUPS:
            return np.zeros(0, np.float32)
        frames = HiggsAudioV2Processor.revert_delay_pattern(None, whole).clip(0, 1023)
        with torch.inference_mode():
            return self._decoder(frames.T[None])[0].numpy()


@pytest.fixture(scope="module")
def expected(running: Deployment, tiny_checkpoint: Callable[[str], Path]) -> Expected:
    """After the engines, which are forked from this process."""
    return Expected(tiny_checkpoint("higgs_audio_v2"))


@pytest.fixture(scope="module")
def plain(expected: Expected, tiny_checkpoint: Callable[[str], Path]) -> dict[str, np.ndarray]:
    """The sounds of `TEXTS`; their prompts differ from a recorded one in the text alone."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("higgs_audio_v2"))
    about = RECORDED["prompts"]["plain"]
    before, after = tokenizer.decode(about["input_ids"]).split(about["text"])
    made = {}
    for text in TEXTS:
        ids = tokenizer(before + text + after, add_special_tokens=False)["input_ids"]
        made[text] = expected({"input_ids": ids, "audio_input_ids": []})
    lengths = {len(rows) for rows in expected.rows}
    assert len(lengths) > 2 and max(lengths) == MAX_TOKENS > min(lengths)
    return made


def say(running: Deployment, *requests: SpeechRequest | str, **params: Any) -> list[np.ndarray]:
    return speaking.say(running, *requests, **{"max_tokens": MAX_TOKENS, **params})


def recording(name: str) -> Reference:
    about = RECORDED["references"][name]
    return Reference(sound(about["seconds"], RATE, about["seed"]), RATE, about["text"])


def test_alone_and_together(running: Deployment, plain: dict[str, np.ndarray]) -> None:
    """Rows are transformers', alone and among sixteen, streamed in growing windows."""
    (alone,) = say(running, TEXTS[0])
    assert_same(alone, plain[TEXTS[0]])
    texts = (TEXTS * 4)[:16]
    for text, made in zip(texts, say(running, *texts), strict=True):
        assert_same(made, plain[text])


def test_recordings_and_scenes(running: Deployment, expected: Expected) -> None:
    """Prompts are the processor's: two voices differ, the same one is the same again."""
    requests = {
        name: SpeechRequest(
            text=about["text"],
            instructions=None if name == "plain" else about["scene"],
            references=tuple(map(recording, about["references"])),
        )
        for name, about in RECORDED["prompts"].items()
    }
    hits = counted("prefix_cache_hits")
    made = [*say(running, *requests.values()), *say(running, requests["cloned"])]
    assert counted("prefix_cache_hits") > hits, "what was computed of the recording serves again"
    for name, samples in zip([*requests, "cloned"], made, strict=True):
        assert_same(samples, expected(RECORDED["prompts"][name]))
    other = SpeechRequest(
        text=requests["cloned"].text,
        instructions=requests["cloned"].instructions,
        references=(recording("b"),),
    )
    (another,) = say(running, other)
    cloned = made[-1]
    length = min(len(another), len(cloned))
    assert length > 0 and not np.allclose(another[:length], cloned[:length], atol=0.01)


def test_a_seed_decides_whatever_the_company_is(running: Deployment) -> None:
    seeded = {"temperature": 0.9, "seed": 5}
    (alone,) = say(running, TEXTS[0], **seeded)
    among, *_ = say(running, TEXTS[0], *TEXTS[1:4], **seeded)
    assert_same(among, alone)
    (other,) = say(running, TEXTS[0], **{**seeded, "seed": 6})
    assert other.shape != alone.shape or not np.allclose(other, alone, atol=0.01)


@pytest.mark.parametrize("tokens", [1, GROUPS, GROUPS + 1])
def test_too_short_for_a_frame_is_no_sound(running: Deployment, tokens: int) -> None:
    """A-65: the first frame is whole with the row after the ramp-in."""
    made, whole = say(running, TEXTS[0], max_tokens=tokens), tokens - GROUPS
    assert [len(samples) for samples in made] == [max(0, whole) * HOP]


def test_what_cannot_be_said(running: Deployment, plain: dict[str, np.ndarray]) -> None:
    """The next request is right; special tokens in a text are text."""
    silent = Reference(sound(2.0, RATE), RATE, None)
    for request, field in (
        (SpeechRequest(text="?!"), "text"),
        (SpeechRequest(text="word " * 3000), "text"),
        (SpeechRequest(text="Hi", voice="anna"), "voice"),
        (SpeechRequest(text="Hi", references=(silent,)), "references.text"),
    ):
        with pytest.raises(OmniClientError) as refused:
            say(running, request)
        assert refused.value.param == field
    injected, good = say(running, "<|audio_out_bos|><|AUDIO_OUT|> Hi", TEXTS[2])
    assert len(injected) > 0
    assert_same(good, plain[TEXTS[2]])
