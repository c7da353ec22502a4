# SPDX-License-Identifier: Apache-2.0
"""Mimi as a program equals transformers' `MimiModel`, streamed and batched (A-50, A-68)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import MimiConfig

from tests.diffusion.codecs import cut, encode, random_codes, run_streams
from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import mimi
from vllm_omni.diffusion.programs.code2wav import csm as CSM
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.models.mimi import MimiCodec
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

RATE = 24_000
FRAME = 1920
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Family) -> Loaded:
    return mimi.load_csm(LoadContext(str(tiny_checkpoint("csm")), torch.device("cpu")))


@pytest.fixture(scope="module")
def codec(loaded: Loaded) -> MimiCodec:
    module = loaded.components["codec"].module
    assert isinstance(module, MimiCodec)
    return module


def some_codes(frames: int, seed: int) -> torch.Tensor:
    """int32 [frames, 4]."""
    return random_codes(frames, 4, seed, 2048)


def one_shot(codec: MimiCodec, codes: torch.Tensor) -> torch.Tensor:
    """What transformers makes of it."""
    with torch.inference_mode():
        return codec.decode(codes.T[None].long()).audio_values[0, 0]


def test_receptive_field_of_the_released_checkpoint() -> None:
    config = MimiConfig()
    assert mimi.convolution_context(config) == 4
    assert mimi.attention_context(config) == 997


def test_contexts_are_what_frames_depend_on(codec: MimiCodec) -> None:
    """A change is seen in as many frames after it as the contexts say, and in no more."""
    frames, at = 30, 5
    attention = mimi.attention_context(codec.config)
    convolution = mimi.convolution_context(codec.config)
    codes = some_codes(frames, 0).T[None].long()
    other = codes.clone()
    other[..., at] = (other[..., at] + 1) % 2048
    with torch.inference_mode():
        changed = (codec.latents(codes) != codec.latents(other))[0].any(dim=1).nonzero()[:, 0]
        latents = codec.latents(codes)
        nudged = latents.clone()
        nudged[:, at] += 1
        heard = (codec.samples(latents) != codec.samples(nudged))[0].nonzero()[:, 0] // FRAME
    assert (int(changed.min()), int(changed.max())) == (at, at + attention)
    assert (int(heard.min()), int(heard.max())) == (at, at + convolution)


POLICIES = {
    "usual": ChunkPolicy(2, 25, 25),
    "no context": ChunkPolicy(1, 10),
    "holdback": ChunkPolicy(3, 12, 8, 5),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_streams_equal_the_one_shot(loaded: Loaded, codec: MimiCodec, policy: ChunkPolicy) -> None:
    engine = Engine(CSM, loaded, scheduler=unhurried())
    codes = {str(frames): some_codes(frames, frames) for frames in (1, 5, 37, 60)}
    made = run_streams(engine, {name: cut(rows, policy, 3) for name, rows in codes.items()})
    for name, rows in codes.items():
        assert len(made[name]) == len(rows) * FRAME
        assert_equal(made[name], one_shot(codec, rows))
    assert max(engine.forward_sizes) > 1


@pytest.mark.parametrize("context", ["attention_context", "convolution_context"])
def test_streams_need_their_context(
    loaded: Loaded, codec: MimiCodec, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is no excuse: with less context, the streams differ."""
    exact = vars(mimi)[context](codec.config)
    monkeypatch.setattr(mimi, context, lambda config: exact // 2)
    codes = some_codes(60, 1)
    made = run_streams(Engine(CSM, loaded), {"r": cut(codes, POLICIES["usual"], 3)})["r"]
    assert (made - one_shot(codec, codes)).abs().max() > 1e-3


def test_recordings_are_encoded_as_transformers_does(loaded: Loaded, codec: MimiCodec) -> None:
    """Alone and together, of whole frames (these share their forwards) and not."""
    samples = {"a": 10 * FRAME, "b": 12 * FRAME, "c": 13 * FRAME, "d": 12 * FRAME + 7, "e": RATE}
    recordings = {
        name: torch.from_numpy(sound(length / RATE, RATE, length))
        for name, length in samples.items()
    }
    engine = Engine(CSM, loaded, scheduler=unhurried())
    made = encode(engine, {name: {"reference.0": each} for name, each in recordings.items()})
    assert engine.forward_sizes[3] == 1
    for name, recording in recordings.items():
        with torch.inference_mode():
            expected = codec.encode(recording[None, None]).audio_codes[0].T
        tensors = made[name].tensors
        assert tensors is not None and made[name].modality == "reference"
        assert tensors["codes"].dtype == torch.int32
        assert torch.equal(tensors["codes"].long(), expected)
        assert made[name].meta["frames"] == len(expected) == -(-samples[name] // FRAME)
        assert len(tensors["codes"].unique()) > 10


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (torch.zeros(0), "too short"),
        (torch.zeros(FRAME - 1), "too short"),
        (torch.full((RATE,), float("nan")), "no numbers"),
    ],
    ids=["empty", "short", "nan"],
)
def test_bad_recordings_are_the_clients_fault(
    loaded: Loaded, samples: torch.Tensor, told: str
) -> None:
    (end,) = encode(Engine(CSM, loaded), {"r": {"reference.0": samples}}).values()
    assert end.error is not None
    assert end.error.status_code == 400
    assert told in end.error.message


def test_nothing_decodes_to_nothing(loaded: Loaded) -> None:
    engine = Engine(CSM, loaded)
    engine.add("r", Message(final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None


def test_another_codec_is_a_configuration_error(tiny_checkpoint: Family) -> None:
    folder = str(tiny_checkpoint("qwen3_omni_moe"))
    with pytest.raises(OmniConfigError, match="codec_config"):
        mimi.load_csm(LoadContext(folder, torch.device("cpu")))
