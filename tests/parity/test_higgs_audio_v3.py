# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3 through `AsyncOmni` against its description written down plainly, greedily (B-M59,
A-60, A-61, A-65). No package of it runs here: `sglang-omni` needs CUDA.

Codes of recordings are transformers' own, recorded for v2, whose codec it is; sounds are what that
codec's decoder makes of all frames in one go (tests/diffusion holds both to transformers).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.parity import speaking
from tests.parity.harness import Deployment, counted, deployment, speech_config
from tests.parity.speaking import assert_differ, assert_same
from tests.reference.plain_delay import HiggsV3, Position, Row, frames_of
from vllm_omni.diffusion.programs import higgs_audio_v3
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniClientError
from vllm_omni.models.higgs_audio_codec import CodecDecoder
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

RECORDED = json.loads(
    (Path(__file__).parents[1] / "reference/fixtures/higgs_audio_v2/codec.json").read_text()
)["references"]
FAMILY = "higgs_multimodal_qwen3"
RATE, HOP = 24_000, 960
GROUPS, BEGIN, END = 4, 1024, 1025
MAX_TOKENS = 48
TEXTS = ("Hello, how are you?", "One, two, three.", "A", "Bonjour, ça va?", "你好，世界。")


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Callable[[str], Path]) -> Iterator[Deployment]:
    config = speech_config(f"{FAMILY}.yaml")
    with deployment(tiny_checkpoint(FAMILY), deploy_config=config) as started:
        yield started


class Expected:
    """Sounds, and whether their rows ended by themselves."""

    def __init__(self, folder: Path) -> None:
        self.ended: list[bool] = []
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        text_config = json.loads((folder / "config.json").read_text())["text_config"]
        self._model = HiggsV3(folder, text_config, GROUPS, BEGIN, END)
        loaded = higgs_audio_v3.load(LoadContext(str(folder), torch.device("cpu")))
        decoder = loaded.components["decoder"].module
        assert isinstance(decoder, CodecDecoder)
        self._decoder = decoder

    def __call__(self, *parts: str | Sequence[Row], max_tokens: int = MAX_TOKENS) -> np.ndarray:
        """Of a prompt: text that holds special tokens, and rows of a recording."""
        prompt: list[Position] = []
        for part in parts:
            if isinstance(part, str):
                ids = self._tokenizer(part, add_special_tokens=False)["input_ids"]
                prompt += [Position(text=token) for token in ids]
            else:
                prompt += [Position(codes=row) for row in part]
        rows, ended = self._model.rows(prompt, max_tokens)
        self.ended.append(ended)
        frames = frames_of(rows, GROUPS)
        if len(frames) == 0:
            return np.zeros(0, np.float32)
        with torch.inference_mode():
            return self._decoder(frames.T[None])[0].numpy()


@pytest.fixture(scope="module")
def expected(running: Deployment, tiny_checkpoint: Callable[[str], Path]) -> Expected:
    """After the engines, which are forked from this process."""
    return Expected(tiny_checkpoint(FAMILY))


@pytest.fixture(scope="module")
def plain(expected: Expected) -> dict[str, np.ndarray]:
    """The sounds of `TEXTS`."""
    made = {text: expected(f"<|tts|><|text|>{text}<|audio|>") for text in TEXTS}
    assert 1 < sum(expected.ended) < len(TEXTS), "some end by themselves, some do not"
    return made


def say(running: Deployment, *requests: SpeechRequest | str, **params: float) -> list[np.ndarray]:
    return speaking.say(running, *requests, **{"max_tokens": MAX_TOKENS, **params})


def recording(name: str, text: str | None = None) -> Reference:
    about = RECORDED[name]
    return Reference(sound(about["seconds"], RATE, about["seed"]), RATE, text)


def rows_of(name: str) -> list[Row]:
    """Of a recording, its codes delayed."""
    codes = RECORDED[name]["codes"]
    count = len(codes)

    def code(row: int, group: int) -> int:
        frame = row - group
        return BEGIN if frame < 0 else codes[frame][group] if frame < count else END

    return [[code(row, group) for group in range(GROUPS)] for row in range(count + GROUPS - 1)]


def test_alone_and_together(running: Deployment, plain: dict[str, np.ndarray]) -> None:
    """Rows are the description's, alone and among sixteen, streamed in growing windows."""
    (alone,) = say(running, TEXTS[0])
    assert_same(alone, plain[TEXTS[0]])
    texts = (TEXTS * 4)[:16]
    for text, made in zip(texts, say(running, *texts), strict=True):
        assert_same(made, plain[text])


def test_recordings_are_spoken_after(running: Deployment, expected: Expected) -> None:
    """With what is said in them, or without: two voices differ, the same is the same again."""
    text = TEXTS[0]
    requests = [
        SpeechRequest(text=text, references=(recording("a", "Warm and calm."),)),
        SpeechRequest(text=text, references=(recording("a"),)),
        SpeechRequest(text=text, references=(recording("b"),)),
    ]
    told, untold, other = say(running, *requests)
    hits = counted("prefix_cache_hits")
    (again,) = say(running, requests[1])
    assert counted("prefix_cache_hits") > hits, "what was computed of the recording serves again"
    end = f"<|text|>{text}<|audio|>"
    assert_same(told, expected("<|tts|><|ref_text|>Warm and calm.<|ref_audio|>", rows_of("a"), end))
    assert_same(untold, expected("<|tts|><|ref_audio|>", rows_of("a"), end))
    assert_same(other, expected("<|tts|><|ref_audio|>", rows_of("b"), end))
    assert_same(again, untold)
    assert_differ(untold, other)
    assert_differ(untold, told)


def test_a_text_says_how_and_nothing_else(running: Deployment, expected: Expected) -> None:
    """Control tokens of the checkpoint are tokens; those of the prompt, and unknown ones, text."""
    how = "Well <|prosody:pause|> yes. <|emotion:elation|>Hello!"
    text = "<|audio|><|im_end|> Hi <|emotion:none|>"
    made, injected = say(running, how, text)
    assert_same(made, expected(f"<|tts|><|text|>{how}<|audio|>"))
    assert len(injected) > 0
    assert_differ(injected, expected(f"<|tts|><|text|>{text}<|audio|>"))


def test_a_seed_decides_whatever_the_company_is(running: Deployment) -> None:
    seeded = {"temperature": 1.0, "seed": 5}
    (alone,) = say(running, TEXTS[0], **seeded)
    among, *_ = say(running, TEXTS[0], *TEXTS[1:4], **seeded)
    assert_same(among, alone)
    (other,) = say(running, TEXTS[0], **{**seeded, "seed": 6})
    assert_differ(other, alone)


@pytest.mark.parametrize("tokens", [1, GROUPS - 1, GROUPS])
def test_too_short_for_a_frame_is_no_sound(
    running: Deployment, plain: dict[str, np.ndarray], tokens: int
) -> None:
    """A-65: T rows are T - Q + 1 frames, or none; the next request is right."""
    (made,) = say(running, TEXTS[0], max_tokens=tokens)
    assert len(made) == max(0, tokens - GROUPS + 1) * HOP
    assert_same(say(running, TEXTS[2])[0], plain[TEXTS[2]])


def test_what_cannot_be_said(running: Deployment) -> None:
    for request, field in (
        (SpeechRequest(text="?!"), "text"),
        (SpeechRequest(text="word " * 3000), "text"),
        (SpeechRequest(text="Hi", instructions="Slowly."), "instructions"),
        (SpeechRequest(text="Hi", references=(recording("a"), recording("b"))), "references"),
    ):
        with pytest.raises(OmniClientError) as refused:
            say(running, request)
        assert refused.value.param == field
