# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS through `AsyncOmni` against the authors' package, greedily (A-50, I-17, B-M50..B-M52).

The package's frames were recorded (tests/reference/record_qwen3_tts.py). What a client gets is
sound, so they are decoded in one go by the codec, which tests/diffusion holds to the package's own
waveforms, and compared with the joined stream.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.harness import Deployment, counted, deployment, speech_config
from vllm_omni.diffusion.programs import qwen3_tts
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniClientError
from vllm_omni.models.qwen3_tts_codec import CodecDecoder
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FIXTURES = Path(__file__).parents[1] / "reference" / "fixtures" / "qwen3_tts"
RECORDED = json.loads((FIXTURES / "frames.json").read_text())
RATE = 24_000
FRAME = 1920
"""Samples."""
# Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently.
TOLERANCE = 1e-4
CONFIG = speech_config("qwen3_tts.yaml")
GREEDY = [{"temperature": 0, "max_tokens": RECORDED["max_new_tokens"]}, None]


class Speaker:
    """A deployment of one kind of checkpoint, and its codec beside it."""

    def __init__(self, kind: str, model: Path, running: Deployment) -> None:
        self.kind = kind
        self.cases: list[dict[str, Any]] = RECORDED["cases"][kind]
        self._running = running
        module = qwen3_tts.load(LoadContext(str(model), torch.device("cpu"))).components["decoder"]
        assert isinstance(module.module, CodecDecoder)
        self._decoder = module.module

    def say(self, *requests: SpeechRequest | str, **params: Any) -> list[np.ndarray]:
        """The sounds of requests that run at the same time."""

        async def one(request: SpeechRequest | str) -> np.ndarray:
            return np.concatenate(await self._pieces(request, **params))

        async def together() -> list[np.ndarray]:
            return await asyncio.gather(*map(one, requests))

        return self._running.run(together())

    @property
    def voices(self) -> tuple[str, ...]:
        """Speakers that `AsyncOmni` names."""
        return self._running.omni.voices

    def pieces(self, request: SpeechRequest) -> list[np.ndarray]:
        """The sound of a request as it is streamed."""
        return self._running.run(self._pieces(request))

    async def _pieces(self, request: SpeechRequest | str, **params: Any) -> list[np.ndarray]:
        stages = [{**GREEDY[0], **params}, None]
        outputs = self._running.omni.generate(request, sampling_params_list=stages)
        return [o.audio.samples async for o in outputs if o.audio is not None]

    def expected(self, case: dict[str, Any]) -> np.ndarray:
        """The package's frames, decoded in one go; of a continued recording, what follows it."""
        request = case["request"]
        before: list[list[int]] = []
        if "reference" in request and not request.get("x_vector_only_mode"):
            before = RECORDED["references"][request["reference"]]["codes"]
        codes = torch.tensor([*before, *case["frames"]])
        with torch.inference_mode():
            made = self._decoder(codes.T[None])[0]
        return made[len(before) * len(made) // len(codes) :].numpy()


@pytest.fixture(
    scope="module",
    params=["custom_voice", "base", pytest.param("voice_design", marks=pytest.mark.full_model)],
)
def speaker(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]
) -> Iterator[Speaker]:
    model = tiny_checkpoint(f"qwen3_tts_{request.param}")
    with deployment(model, deploy_config=CONFIG) as running:
        yield Speaker(request.param, model, running)


def request_of(case: dict[str, Any]) -> SpeechRequest:
    """A recorded request, as ours says it."""
    given = dict(case["request"])
    references = ()
    if (name := given.pop("reference", None)) is not None:
        about = RECORDED["references"][name]
        samples = sound(about["seconds"], RATE, about["seed"])
        references = (Reference(samples, RATE, about["text"]),)
    return SpeechRequest(
        text=given.pop("text"),
        voice=given.pop("speaker", None),
        language=given.pop("language", None),
        instructions=given.pop("instruct", None) or None,
        non_streaming=given.pop("non_streaming_mode"),
        x_vector_only=given.pop("x_vector_only_mode", False),
        references=references,
    )


def assert_same(made: np.ndarray, expected: np.ndarray) -> None:
    assert made.shape == expected.shape
    np.testing.assert_allclose(made, expected, rtol=0, atol=TOLERANCE)


def test_alone_and_together(speaker: Speaker) -> None:
    """Frames are the package's, alone and among up to sixteen, streamed in growing windows."""
    requests = [request_of(case) for case in speaker.cases]
    expected = [speaker.expected(case) for case in speaker.cases]
    (alone,) = speaker.say(requests[0])
    assert_same(alone, expected[0])
    times = -(-16 // len(requests))
    for i, made in enumerate(speaker.say(*requests * times)):
        assert_same(made, expected[i % len(expected)])


def test_the_voice_is_that_of_the_recording(speaker: Speaker) -> None:
    """Two recordings give different frames, the same one the same; the cache changes no sample."""
    if speaker.kind != "base":
        with pytest.raises(OmniClientError) as refused:
            speaker.say(SpeechRequest(text="Hi", references=(Reference(sound(2.0), RATE, "a"),)))
        assert refused.value.param == "references"
        return
    first, other = (Reference(sound(3.0, RATE, seed), RATE, "Hello.") for seed in (7, 8))
    asked = [SpeechRequest(text="One, two.", references=(each,)) for each in (first, other, first)]
    one, two, again = speaker.say(*asked)
    hits = counted("prefix_cache_hits")
    (later,) = speaker.say(asked[0])
    assert counted("prefix_cache_hits") > hits, "what was computed of the recording serves again"
    assert one.shape != two.shape or not np.allclose(one, two, atol=0.01)
    np.testing.assert_allclose(one, again, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(one.shape, later.shape)
    np.testing.assert_allclose(one, later, rtol=0, atol=TOLERANCE)


def test_a_seed_decides_whatever_the_company_is(speaker: Speaker) -> None:
    request = request_of(speaker.cases[-1])
    others = [request_of(case) for case in speaker.cases[:3]]
    seeded = {"temperature": 0.9, "seed": 5}
    (alone,) = speaker.say(request, **seeded)
    among, *_ = speaker.say(request, *others, **seeded)
    assert_same(among, alone)


def test_the_first_piece_is_as_long_as_asked(speaker: Speaker) -> None:
    """I-17; whatever the pieces are, they are the same sound."""
    request = request_of(speaker.cases[1])
    for frames in (1, 4):
        first, *rest = speaker.pieces(replace(request, initial_frames=frames))
        assert len(first) == frames * FRAME
        assert_same(np.concatenate([first, *rest]), speaker.expected(speaker.cases[1]))


def test_voices_are_the_checkpoints(speaker: Speaker) -> None:
    own = ("serena", "vivian", "eric") if speaker.kind == "custom_voice" else ()
    assert speaker.voices == own


def test_what_cannot_be_said(speaker: Speaker) -> None:
    """The next request is right."""
    good = request_of(speaker.cases[0])
    for text, field in (("", "text"), ("?!", "text"), ("\x00", "text")):
        with pytest.raises(OmniClientError) as refused:
            speaker.say(SpeechRequest(text=text, references=good.references))
        assert refused.value.param == field
    for streamed_in in (False, True):
        long = SpeechRequest(
            text="word " * 9000, non_streaming=not streamed_in, references=good.references
        )
        with pytest.raises(OmniClientError, match="positions") as refused:
            speaker.say(long)
        assert refused.value.param == "text"
    (made,) = speaker.say(good)
    assert_same(made, speaker.expected(speaker.cases[0]))
