# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's codec equals the authors' package, streamed and batched (A-50, A-68, B-M50..52)."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.diffusion.codecs import cut, encode, random_codes, run_streams
from tests.diffusion.schedulers import unhurried
from vllm_omni.config.hf.qwen3_tts_codec import Qwen3TTSCodecDecoderConfig
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import qwen3_tts
from vllm_omni.diffusion.programs.code2wav import qwen3_tts as QWEN3_TTS
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.inputs import Window
from vllm_omni.models.qwen3_tts_codec import CodecDecoder
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FIXTURES = Path(__file__).parents[1] / "reference" / "fixtures" / "qwen3_tts"
RATE = 24_000
FRAME = 1920
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """What the authors' package answered; see `tests/reference/record_qwen3_tts.py`."""
    return json.loads((FIXTURES / "frames.json").read_text())


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Family) -> Loaded:
    return qwen3_tts.load(LoadContext(str(tiny_checkpoint("qwen3_tts_base")), torch.device("cpu")))


@pytest.fixture(scope="module")
def decoder(loaded: Loaded) -> CodecDecoder:
    module = loaded.components["decoder"].module
    assert isinstance(module, CodecDecoder)
    return module


def some_codes(frames: int, seed: int) -> torch.Tensor:
    """int32 [frames, 4]."""
    return random_codes(frames, 4, seed, 2048)


def one_shot(decoder: CodecDecoder, codes: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder(codes.T[None].long())[0]


def recording(reference: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(sound(reference["seconds"], RATE, reference["seed"]))


# Decoding.


def test_receptive_field_of_the_released_checkpoint() -> None:
    config = Qwen3TTSCodecDecoderConfig()
    assert qwen3_tts.convolution_context(config) == 10
    assert qwen3_tts.attention_context(config) == 570


def test_a_frame_changes_its_own_samples_and_those_of_its_context(decoder: CodecDecoder) -> None:
    context = qwen3_tts.convolution_context(decoder.config)
    latents = torch.randn(1, 30, decoder.config.latent_dim, generator=torch.Generator())
    changed = latents.clone()
    changed[:, 12] += 1
    with torch.inference_mode():
        differs = (decoder.samples(latents) != decoder.samples(changed))[0].nonzero()[:, 0]
    first, last = int(differs.min()), int(differs.max())
    assert 12 * FRAME <= first < 13 * FRAME <= last < (12 + context + 1) * FRAME


def test_sound_is_that_of_the_reference(loaded: Loaded, recorded: dict[str, Any]) -> None:
    """One shot; with a recording's codes as context it starts where these end."""
    with np.load(FIXTURES / "sounds.npz") as sounds:
        expected = {name: torch.from_numpy(sounds[name] / np.float32(32767)) for name in sounds}
    streams = {}
    for name in expected:
        kind, index = name.split(".")
        case = recorded["cases"][kind][int(index)]
        codes = torch.tensor(case["frames"], dtype=torch.int32)
        (message,) = cut(codes, ChunkPolicy.one_shot(), len(codes))
        if "reference" in case["request"]:
            context = recorded["references"][case["request"]["reference"]]["codes"]
            tensors = {**message.tensors, "reference_codes": torch.tensor(context)}
            message = Message(tensors=tensors, windows=message.windows, final=True)
        streams[name] = [message]
    assert any("reference_codes" in messages[0].tensors for messages in streams.values())
    made = run_streams(Engine(QWEN3_TTS, loaded), streams)
    for name, samples in made.items():
        assert len(samples) == len(streams[name][0].tensors["codes"]) * FRAME
        # Its cut by a fraction may leave it one sample of the recording.
        assert len(expected[name]) - len(samples) in (0, 1)
        assert_equal(samples, expected[name][-len(samples) :])


POLICIES = {
    "usual": ChunkPolicy(4, 25, 25),
    "no context": ChunkPolicy(1, 10),
    "holdback": ChunkPolicy(3, 12, 8, 5),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_streams_equal_the_one_shot(
    loaded: Loaded, decoder: CodecDecoder, policy: ChunkPolicy
) -> None:
    """Also where a recording's codes, fewer and more than the decoder's context, come before."""
    engine = Engine(QWEN3_TTS, loaded, scheduler=unhurried())
    codes = {(frames, before): some_codes(before + frames, frames) for frames, before in CUTS}
    streams = {}
    for (frames, before), rows in codes.items():
        first, *others = cut(rows[before:], policy, 3)
        tensors = {**first.tensors, "reference_codes": rows[:before]} if before else first.tensors
        first = Message(tensors=tensors, windows=first.windows, final=first.final)
        streams[f"{frames} {before}"] = [first, *others]
    made = run_streams(engine, streams)
    for (frames, before), rows in codes.items():
        expected = one_shot(decoder, rows)[before * FRAME :]
        assert_equal(made[f"{frames} {before}"], expected)
    assert max(engine.forward_sizes) > 1


CUTS = ((1, 0), (5, 0), (37, 0), (11, 4), (17, 40))


@pytest.mark.parametrize("context", ["attention_context", "convolution_context"])
def test_streams_need_their_context(
    loaded: Loaded, decoder: CodecDecoder, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is no excuse: with less context, the streams differ."""
    exact = vars(qwen3_tts)[context](decoder.config)
    monkeypatch.setattr(qwen3_tts, context, lambda config: exact - 3)
    codes = some_codes(40, 1)
    made = run_streams(Engine(QWEN3_TTS, loaded), {"r": cut(codes, POLICIES["usual"], 3)})["r"]
    assert (made - one_shot(decoder, codes)).abs().max() > 1e-3


def test_different_lengths_run_together(loaded: Loaded, decoder: CodecDecoder) -> None:
    engine = Engine(QWEN3_TTS, loaded, scheduler=unhurried())
    codes = {f"r{n}": some_codes(n, n) for n in (20, 23, 30)}
    streams = {name: cut(rows, ChunkPolicy.one_shot(), 100) for name, rows in codes.items()}
    made = run_streams(engine, streams)
    assert engine.forward_sizes == {3: 2}
    for name, rows in codes.items():
        assert_equal(made[name], one_shot(decoder, rows))


def test_nothing_decodes_to_nothing(loaded: Loaded) -> None:
    engine = Engine(QWEN3_TTS, loaded)
    engine.add("alone", Message(final=True))
    engine.add("later", Message(tensors={"reference_codes": some_codes(5, 0)}))
    engine.receive("later", Message(final=True))
    ends = {emission.request_id: emission for emission in engine.step()}
    assert set(ends) == {"alone", "later"}
    for end in ends.values():
        assert end.finished and end.error is None and end.tensors is None


@pytest.mark.parametrize("bad", [-1, 2048])
@pytest.mark.parametrize("where", ["codes", "reference_codes"])
def test_codes_out_of_range_fail_their_request_only(loaded: Loaded, where: str, bad: int) -> None:
    engine = Engine(QWEN3_TTS, loaded)
    for name in ("good", "bad"):
        tensors = {"codes": some_codes(4, 0), "reference_codes": some_codes(4, 1)}
        if name == "bad":
            tensors[where][3, 1] = bad
        windows = (Window(0, 4, 0, 4, True),)
        engine.add(name, Message(tensors=tensors, windows=windows, final=True))
    ends = {}
    while engine.has_work:
        ends.update({emission.request_id: emission for emission in engine.step()})
    assert ends["good"].error is None
    assert ends["bad"].error is not None


# Encoding.


def test_recordings_are_encoded_as_the_reference_does(
    loaded: Loaded, recorded: dict[str, Any]
) -> None:
    """Alone and all together; the same recording twice shares its forwards."""
    references = recorded["references"]
    requests = {
        f"{name} {turn}": {"reference.0": recording(reference)}
        for name, reference in references.items()
        for turn in range(2)
    }
    engine = Engine(QWEN3_TTS, loaded, scheduler=unhurried())
    together = encode(engine, requests)
    assert engine.forward_sizes == {2: 4}
    alone = encode(Engine(QWEN3_TTS, loaded), {"a 0": requests["a 0"]})
    for name, emission in [*together.items(), *alone.items()]:
        expected = references[name.split()[0]]
        assert emission.modality == "reference" and emission.error is None
        assert emission.tensors is not None
        codes, x_vector = emission.tensors["codes"], emission.tensors["x_vector"]
        assert codes.dtype == torch.int32 and x_vector.dtype == torch.float32
        assert codes.tolist() == expected["codes"]
        assert emission.meta["frames"] == len(codes)
        assert_equal(x_vector, torch.tensor(expected["x_vector"]))


def test_recordings_of_whole_frames_run_together(loaded: Loaded) -> None:
    lengths = {f"r{frames}": frames * FRAME for frames in (10, 12, 13)}
    requests = {
        name: {"reference.0": torch.from_numpy(sound(length / RATE, RATE, length))}
        for name, length in lengths.items()
    }
    engine = Engine(QWEN3_TTS, loaded, scheduler=unhurried())
    together = encode(engine, requests)
    assert engine.forward_sizes[3] == 1
    for name, emission in together.items():
        (alone,) = encode(Engine(QWEN3_TTS, loaded), {name: requests[name]}).values()
        assert emission.tensors is not None and alone.tensors is not None
        assert len(emission.tensors["codes"]) == lengths[name] // FRAME
        assert torch.equal(emission.tensors["codes"], alone.tensors["codes"])


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "no recording"),
        ({"reference.0": torch.zeros(0)}, "too short"),
        ({"reference.0": torch.zeros(FRAME - 1)}, "too short"),
        ({"reference.0": torch.full((RATE,), float("nan"))}, "no numbers"),
    ],
    ids=["none", "empty", "short", "nan"],
)
def test_bad_recordings_are_the_clients_fault(
    loaded: Loaded, tensors: dict[str, torch.Tensor], told: str
) -> None:
    (end,) = encode(Engine(QWEN3_TTS, loaded), {"r": tensors}).values()
    assert end.error is not None
    assert end.error.status_code == 400
    assert told in end.error.message


def test_a_checkpoint_with_voices_of_its_own_encodes_nothing(tiny_checkpoint: Family) -> None:
    folder = str(tiny_checkpoint("qwen3_tts_custom_voice"))
    loaded = qwen3_tts.load(LoadContext(folder, torch.device("cpu"), torch.bfloat16))
    assert set(loaded.components) == {"decoder"}
    (end,) = encode(Engine(QWEN3_TTS, loaded), {"r": {"reference.0": torch.zeros(RATE)}}).values()
    assert end.error is not None and end.error.status_code == 400


def test_another_codec_is_a_configuration_error(tiny_checkpoint: Family) -> None:
    folder = str(tiny_checkpoint("qwen3_omni_moe"))
    with pytest.raises(OmniConfigError, match="qwen3_tts_tokenizer_12hz"):
        qwen3_tts.load(LoadContext(folder, torch.device("cpu")))
