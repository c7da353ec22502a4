# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2 through `AsyncOmni` against the authors' package, with the same noise (A-69, A-70, I-17).

What the package makes was recorded by `tests/reference/record_voxcpm2.py`.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.parity.harness import BLOCK, counted, deployment, speech_config
from tests.parity.speaking import Speaker, assert_same
from vllm_omni.config.hf import register_configs
from vllm_omni.diffusion.programs.convolutions import ConvolutionDecoding
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs import Window
from vllm_omni.models.voxcpm2_codec import SoundDecoder, decoder_context, folded
from vllm_omni.pipelines.voxcpm2 import STOPS
from vllm_omni.speech.request import Reference, SpeechRequest
from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.voxcpm2 import Model

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FIXTURES = Path(__file__).parents[1] / "reference" / "fixtures" / "voxcpm2"
RECORDING_RATE = 16_000
FRAME = 1280
MARGIN = 1e-3
ROUNDING_MARGIN = 1e-4
MAX_FRAMES = 20
CONFIG = speech_config("voxcpm2.yaml")
BYTES_PER_TOKEN = 3 * 2 * 1 * 32 * 4
"""Layers of both language models, keys and values, heads, head size, float32."""
# So small that requests preempt each other.
CONFIG["stages"][0] |= {
    "max_model_len": 4 * BLOCK,
    "kv_cache_memory_bytes": 9 * BLOCK * BYTES_PER_TOKEN,
}


@dataclass(frozen=True)
class Case:
    """Something to say, and what the package made of it."""

    said: dict[str, Any]
    latents: np.ndarray
    sound: np.ndarray

    @property
    def request(self) -> SpeechRequest:
        heard = self.said.get("recording")
        return SpeechRequest(
            text=self.said["text"],
            instructions=self.said.get("instructions"),
            references=(recording(*heard, self.said.get("transcript")),) if heard else (),
        )

    @property
    def params(self) -> dict[str, Any]:
        return {"max_tokens": MAX_FRAMES, "seed": self.said["seed"]}


def recording(seconds: float, seed: int, transcript: str | None = None) -> Reference:
    return Reference(sound(seconds, RECORDING_RATE, seed), RECORDING_RATE, transcript)


ARRAYS = dict(np.load(FIXTURES / "arrays.npz"))
CASES = tuple(
    Case(said, ARRAYS[f"{i}.latents"], ARRAYS[f"{i}.sound"].astype(np.float32) / 32767)
    for i, said in enumerate(json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8")))
)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("voxcpm2")


@pytest.fixture(scope="module")
def speaker(checkpoint: Path) -> Iterator[Speaker]:
    with deployment(checkpoint, deploy_config=CONFIG) as running:
        yield Speaker(running)


def test_the_cases_are_telling() -> None:
    """Some speech ends by itself, and rounding decides nothing."""
    assert {case.said["frames"] == MAX_FRAMES for case in CASES} == {True, False}
    assert min(case.said["margin"] for case in CASES) > MARGIN
    assert min(case.said["rounding"] for case in CASES) > ROUNDING_MARGIN


def test_alone_and_together(speaker: Speaker) -> None:
    """The sound is the package's, alone and among sixteen, streamed in growing windows."""
    for case in CASES:
        (alone,) = speaker.say((case.request, case.params))
        assert_same(alone, case.sound)
    pieces = speaker.running.run(speaker.pieces(CASES[0].request, CASES[0].params))
    assert [len(piece) // FRAME for piece in pieces] == [1, 2, 4, 8, 5]
    order = [i % len(CASES) for i in range(16)]
    asked = [(CASES[i].request, CASES[i].params) for i in order]
    for i, made in zip(order, speaker.say(*asked), strict=True):
        assert_same(made, CASES[i].sound)


def test_what_is_shared_changes_nothing(speaker: Speaker) -> None:
    """Requests that begin alike share what was computed, and take turns with the little memory that
    there is."""
    for _ in range(2):
        hits = counted("prefix_cache_hits")
        (made,) = speaker.say((CASES[3].request, CASES[3].params))
        assert_same(made, CASES[3].sound)
    assert counted("prefix_cache_hits") > hits
    endless = {"max_tokens": 32, "logit_bias": {STOPS: -100.0}, "seed": 1}
    asked = [(CASES[i].request, endless) for i in (0, 1)]
    alone = [speaker.say(each)[0] for each in asked]
    preemptions = counted("num_preemptions")
    for i, made in enumerate(speaker.say(*asked * 5)):
        assert_same(made, alone[i % 2])
    assert counted("num_preemptions") > preemptions


def test_a_recording_is_the_voice(speaker: Speaker) -> None:
    """Other recordings give other frames, the same one the same, and the cache of recordings
    changes no sample; another seed, another sound."""
    case = CASES[3]
    first = case.request
    asked = [
        (first, case.params),
        (replace(first, references=(recording(4.0, 9),)), case.params),
        (replace(first, references=()), case.params),
        (first, {**case.params, "seed": 77}),
    ]
    one, *others = speaker.say(*asked)
    (again,) = speaker.say((first, case.params))
    assert_same(one, again)
    (heard,) = first.references
    (begun,) = speaker.say((replace(first, references=(replace(heard, text="So."),)), case.params))
    others.append(begun)
    for other in others:
        length = min(len(one), len(other))
        assert not np.allclose(one[:length], other[:length], atol=0.01)


def test_frames_are_the_packages(checkpoint: Path) -> None:
    """Of the same noise and hidden states, several at once, and in memory of their own (A-70). The
    package runs the same batch; sums are ordered otherwise."""
    register_configs()
    model = Model(AutoConfig.from_pretrained(checkpoint))
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    given = [torch.from_numpy(ARRAYS[f"flow.{name}"]) for name in ("hidden", "last", "noise")]
    hidden, last, noise = given
    with torch.inference_mode():
        made = model.feat_decoder(hidden, last, noise)
        kept = made.clone()
        model.feat_decoder(-hidden, last, noise)
    expected = torch.from_numpy(ARRAYS["flow.made"])
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(made, kept)


def test_sound_of_recorded_frames(checkpoint: Path) -> None:
    """The package's frames sound as there, in one piece and in others."""
    register_configs()
    config = AutoConfig.from_pretrained(checkpoint)
    codec = config.audio_vae_config
    decoder = SoundDecoder(codec).eval()
    tensors = folded(load_file(checkpoint / "audiovae.safetensors"))
    own = {k.removeprefix("decoder."): v for k, v in tensors.items() if k.startswith("decoder.")}
    decoder.load_state_dict(own)
    latents = torch.from_numpy(CASES[0].latents)
    context = -(-decoder_context(codec) // config.patch_size)

    @torch.inference_mode()
    def decode(frames: torch.Tensor) -> torch.Tensor:
        return decoder.samples(frames.reshape(1, -1, config.feat_dim))

    stops = range(1, len(latents) + 1)
    decoding = ConvolutionDecoding(decode, FRAME, context)
    decoding.append(latents)
    pieces = [decoding(Window(0, stop, stop - 1, stop, stop == len(stops))) for stop in stops]
    assert_same(torch.cat(pieces).numpy(), CASES[0].sound)
    assert_same(decode(latents)[0].numpy(), CASES[0].sound)


def test_speech_of_any_length(speaker: Speaker) -> None:
    """One frame; and speech that would end at once does not before it may (A-65)."""
    case = CASES[5]
    (short,) = speaker.say((case.request, {**case.params, "max_tokens": 1, "min_tokens": 0}))
    assert_same(short, case.sound[:FRAME])
    (least,) = speaker.say((case.request, {**case.params, "logit_bias": {STOPS: 100.0}}))
    assert_same(least, case.sound[: 4 * FRAME])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (SpeechRequest(text="Hi", voice="anna"), "voice"),
        (SpeechRequest(text="?!"), "text"),
        (SpeechRequest(text="Hi", references=(recording(2.0, 1),) * 2), "references"),
        (SpeechRequest(text="Hi", speaker_embedding=np.ones(64)), "speaker_embedding"),
        (SpeechRequest(text="word " * 9000), "text"),
    ],
)
def test_what_cannot_be_said(speaker: Speaker, request_: SpeechRequest, field: str) -> None:
    with pytest.raises(OmniClientError) as refused:
        speaker.say((request_, {}))
    assert refused.value.param == field
