# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS's codec as a program equals a plain implementation, streamed and batched (B-44)."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.diffusion.codecs import cut, encode, run_streams
from tests.diffusion.schedulers import unhurried
from tests.reference.voxtral_tts import PlainVoxtral
from vllm_omni.config.hf.voxtral_tts import SPECIAL_CODES, VoxtralCodecConfig
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import voxtral_tts
from vllm_omni.diffusion.programs.code2wav import voxtral_tts as VOXTRAL
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.models.voxtral_codec import alibi_slopes, decoder_context
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

RATE = 24_000
FRAME = 1920
LEVELS = 21
SEMANTIC = 96
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Family) -> Loaded:
    return voxtral_tts.load(LoadContext(str(tiny_checkpoint("voxtral_tts")), torch.device("cpu")))


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Family) -> PlainVoxtral:
    return PlainVoxtral(tiny_checkpoint("voxtral_tts"))


def some_codes(frames: int, seed: int) -> torch.Tensor:
    """int64 [frames, 7], without special ones."""
    generator = torch.Generator().manual_seed(seed)
    semantic = torch.randint(SEMANTIC, (frames, 1), generator=generator)
    return torch.cat([semantic, torch.randint(LEVELS, (frames, 6), generator=generator)], dim=1)


def test_of_the_released_checkpoint() -> None:
    config = VoxtralCodecConfig()
    assert config.samples_per_frame == FRAME
    assert decoder_context(config) == 21
    assert alibi_slopes(8) == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128]


@pytest.mark.parametrize("part", [voxtral_tts.PART, 16], ids=["whole", "in parts"])
@pytest.mark.parametrize("policy", [ChunkPolicy(2, 25, 25), ChunkPolicy.one_shot()])
def test_streams_equal_the_one_shot(
    loaded: Loaded,
    plain: PlainVoxtral,
    policy: ChunkPolicy,
    part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(voxtral_tts, "PART", part)
    engine = Engine(VOXTRAL, loaded, scheduler=unhurried())
    codes = {str(frames): some_codes(frames, frames) for frames in (1, 5, 37, 60)}
    streams = {name: cut(rows + SPECIAL_CODES, policy, 3) for name, rows in codes.items()}
    made = run_streams(engine, streams)
    for name, rows in codes.items():
        assert_equal(made[name], plain.decode(rows))
    assert max(engine.forward_sizes) > 1 or policy.initial > len(codes)


def test_streams_need_their_context(
    loaded: Loaded, plain: PlainVoxtral, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is no excuse: with less context, the streams differ."""
    monkeypatch.setattr(voxtral_tts, "decoder_context", lambda config: 4)
    codes = some_codes(60, 1)
    streams = {"r": cut(codes + SPECIAL_CODES, ChunkPolicy(2, 25, 25), 3)}
    made = run_streams(Engine(VOXTRAL, loaded), streams)["r"]
    assert (made - plain.decode(codes)).abs().max() > 1e-3


def test_recordings(loaded: Loaded, plain: PlainVoxtral) -> None:
    samples = {"a": 13 * FRAME, "b": 13 * FRAME, "c": RATE, "d": RATE + 7}
    recordings = {
        name: torch.from_numpy(sound(length / RATE, RATE, seed))
        for seed, (name, length) in enumerate(samples.items())
    }
    made = encode(
        Engine(VOXTRAL, loaded), {name: {"reference.0": each} for name, each in recordings.items()}
    )
    for name, recording in recordings.items():
        tensors = made[name].tensors
        assert tensors is not None and tensors["codes"].dtype == torch.int32
        assert torch.equal(tensors["codes"].long(), plain.encode(recording) + SPECIAL_CODES)
        assert made[name].meta["frames"] == -(-len(recording) // FRAME)


def test_published_checkpoints_encode_nothing(tiny_checkpoint: Family) -> None:
    folder = str(tiny_checkpoint("voxtral_tts_voices_only"))
    loaded = voxtral_tts.load(LoadContext(folder, torch.device("cpu")))
    recording = {"reference.0": torch.from_numpy(sound(1.0, RATE, 1))}
    (end,) = encode(Engine(VOXTRAL, loaded), {"r": recording}).values()
    assert end.error is not None and end.error.status_code == 400


def test_invalid_codes_end_one_request_only(loaded: Loaded, plain: PlainVoxtral) -> None:
    engine = Engine(VOXTRAL, loaded)
    good, bad = some_codes(3, 1), some_codes(3, 2)
    bad[1, 0] = SEMANTIC
    for name, rows in {"good": good, "bad": bad}.items():
        (message,) = cut(rows + SPECIAL_CODES, ChunkPolicy.one_shot(), 3)
        engine.add(name, message)
    ends = {emission.request_id: emission for emission in _all(engine)}
    assert ends["bad"].error is not None
    assert ends["good"].tensors is not None
    assert_equal(ends["good"].tensors["audio"], plain.decode(good))


def test_nothing_decodes_to_nothing(loaded: Loaded) -> None:
    engine = Engine(VOXTRAL, loaded)
    engine.add("r", Message(final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None


def test_another_family_is_a_configuration_error(tiny_checkpoint: Family) -> None:
    folder = str(tiny_checkpoint("csm"))
    with pytest.raises(OmniConfigError, match="no Voxtral TTS"):
        voxtral_tts.load(LoadContext(folder, torch.device("cpu")))


def _all(engine: Engine) -> list:
    emissions = []
    while engine.has_work:
        emissions += engine.step()
    return emissions
