# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v2's codec equals transformers', streamed and batched (A-65, A-66, B-M58)."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2TokenizerConfig

from tests.diffusion.codecs import cut, encode, random_codes, run_streams
from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import higgs_audio_v2, higgs_files
from vllm_omni.diffusion.programs.code2wav import higgs_audio_v2 as HIGGS_AUDIO_V2
from vllm_omni.diffusion.programs.twosided import Reach
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.models.higgs_audio_codec import CodecDecoder
from vllm_omni.speech.delay import delayed
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

FIXTURES = Path(__file__).parents[1] / "reference" / "fixtures" / "higgs_audio_v2"
RECORDED: dict[str, Any] = json.loads((FIXTURES / "codec.json").read_text())
RATE = 24_000
HOP = 960
GROUPS = 4
DELAYS = (1, 2, 3, 4)
LAG = max(DELAYS)
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Family) -> Loaded:
    context = LoadContext(str(tiny_checkpoint("higgs_audio_v2")), torch.device("cpu"))
    return higgs_audio_v2.load(context)


@pytest.fixture(scope="module")
def decoder(loaded: Loaded) -> CodecDecoder:
    module = loaded.components["decoder"].module
    assert isinstance(module, CodecDecoder)
    return module


def some_codes(frames: int, seed: int) -> torch.Tensor:
    """int32 [frames, groups]."""
    return random_codes(frames, GROUPS, seed, 1024)


def one_shot(decoder: CodecDecoder, codes: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return decoder(codes.T[None].long())[0]


def stream(codes: torch.Tensor, policy: ChunkPolicy, arrival: int) -> list[Message]:
    """The messages of frames that come as rows: windows are of frames, which the rows lag."""
    rows = delayed(codes, DELAYS, 1024, 1025)[:-1]
    messages = []
    for message in cut(codes, policy, arrival):
        start = message.start + (LAG if messages else 0)
        stop = message.start + len(message.tensors["codes"]) + LAG
        tensors = {"codes": rows[start:stop]}
        messages.append(
            Message(tensors=tensors, start=start, windows=message.windows, final=message.final)
        )
    return messages


# Decoding.


def test_sound_is_that_of_the_reference(loaded: Loaded) -> None:
    """With end and begin codes among the last frames, which the processor clips."""
    streams = {}
    for name, about in RECORDED["references"].items():
        rows = torch.tensor(about["rows"], dtype=torch.int32)
        ended = (rows == 1025).all(dim=1).nonzero()[0, 0]
        frames = torch.zeros(int(ended) - LAG, GROUPS, dtype=torch.int32)
        (message,) = cut(frames, ChunkPolicy.one_shot(), len(frames))
        streams[name] = [
            Message(tensors={"codes": rows[:ended]}, windows=message.windows, final=True)
        ]
    with np.load(FIXTURES / "sounds.npz") as sounds:
        for name, samples in run_streams(Engine(HIGGS_AUDIO_V2, loaded), streams).items():
            assert_equal(samples, torch.from_numpy(sounds[name] / np.float32(32767)))


def test_reach_is_what_a_frame_changes(loaded: Loaded, decoder: CodecDecoder) -> None:
    reach = loaded.assets["reach"]
    rates = [8, 5, 4, 2, 3]
    released = HiggsAudioV2TokenizerConfig(
        acoustic_model_config={"downsampling_ratios": rates, "upsampling_ratios": rates}
    )
    assert higgs_audio_v2.decoder_reach(released) == reach == Reach(10, 10)
    codes = some_codes(40, 0)
    changed = codes.clone()
    changed[20] = (changed[20] + 1) % 1024
    differs = (one_shot(decoder, codes) != one_shot(decoder, changed)).nonzero()[:, 0]
    first, last = int(differs.min()) // HOP, int(differs.max()) // HOP
    assert (20 - first, last - 20) == (reach.after, reach.before)


POLICIES = {
    "usual": ChunkPolicy(1, 25, 0, 10),
    "no holdback": ChunkPolicy(1, 10),
    "more of it": ChunkPolicy(3, 12, 8, 14),
}
FRAMES = (1, 5, 11, 37)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_streams_equal_the_one_shot(
    loaded: Loaded, decoder: CodecDecoder, policy: ChunkPolicy
) -> None:
    engine = Engine(HIGGS_AUDIO_V2, loaded, scheduler=unhurried())
    codes = {(n, turn): some_codes(n, n + turn) for n in FRAMES for turn in range(2)}
    streams = {f"{name}": stream(rows, policy, 3) for name, rows in codes.items()}
    made = run_streams(engine, streams)
    for name, rows in codes.items():
        assert_equal(made[f"{name}"], one_shot(decoder, rows))
    assert max(engine.forward_sizes) > 1


@pytest.mark.parametrize("reach", [Reach(9, 10), Reach(10, 9)], ids=["before", "after"])
def test_streams_need_their_reach(loaded: Loaded, decoder: CodecDecoder, reach: Reach) -> None:
    """The tolerance is no excuse: with less, the streams differ at all."""
    short = Loaded(loaded.components, {**loaded.assets, "reach": reach})
    codes = some_codes(40, 1)
    messages = stream(codes, POLICIES["no holdback"], 3)
    made = run_streams(Engine(HIGGS_AUDIO_V2, short), {"r": messages})["r"]
    exact = run_streams(Engine(HIGGS_AUDIO_V2, loaded), {"r": messages})["r"]
    whole = one_shot(decoder, codes)
    assert (made - whole).abs().max() > 5 * (exact - whole).abs().max()


@pytest.mark.parametrize("rows", [0, 1, LAG])
def test_too_few_rows_are_no_sound(loaded: Loaded, rows: int) -> None:
    """A-65: nothing, and no error; the same of a stream that had no rows at all."""
    tensors = {"codes": torch.full((rows, GROUPS), 1024)} if rows else {}
    engine = Engine(HIGGS_AUDIO_V2, loaded)
    engine.add("r", Message(tensors=tensors, final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None


def test_codes_out_of_range_are_heard_as_the_nearest(loaded: Loaded, decoder: CodecDecoder) -> None:
    codes = some_codes(6, 3)
    wild = codes.clone()
    wild[2, 1], wild[4, 3] = -7, 2000
    made = run_streams(Engine(HIGGS_AUDIO_V2, loaded), {"r": stream(wild, POLICIES["usual"], 9)})
    codes[2, 1], codes[4, 3] = 0, 1023
    assert_equal(made["r"], one_shot(decoder, codes))


# Encoding.


def test_recordings_are_encoded_as_the_reference_does(loaded: Loaded) -> None:
    """Alone and all together; those of one length share their forwards."""
    references = RECORDED["references"]
    requests = {
        f"{name} {turn}": {
            "reference.0": torch.from_numpy(sound(about["seconds"], RATE, about["seed"]))
        }
        for name, about in references.items()
        for turn in range(2)
    }
    engine = Engine(HIGGS_AUDIO_V2, loaded, scheduler=unhurried())
    together = encode(engine, requests)
    assert engine.forward_sizes == {2: 2}
    alone = encode(Engine(HIGGS_AUDIO_V2, loaded), {"a 0": requests["a 0"]})
    for name, emission in [*together.items(), *alone.items()]:
        assert emission.modality == "reference" and emission.error is None
        assert emission.tensors is not None
        codes = emission.tensors["codes"]
        assert codes.dtype == torch.int32
        assert codes.tolist() == references[name.split()[0]]["codes"]
        assert emission.meta["frames"] == len(codes)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "no recording"),
        ({"reference.0": torch.zeros(HOP - 1)}, "too short"),
        ({"reference.0": torch.full((RATE,), float("nan"))}, "no numbers"),
    ],
    ids=["none", "short", "nan"],
)
def test_bad_recordings_are_the_clients_fault(
    loaded: Loaded, tensors: dict[str, torch.Tensor], told: str
) -> None:
    (end,) = encode(Engine(HIGGS_AUDIO_V2, loaded), {"r": tensors}).values()
    assert end.error is not None and end.error.status_code == 400
    assert told in end.error.message


# Where the codec is.


@pytest.fixture
def apart(tiny_checkpoint: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint without a codec, and nothing in the hub's cache; the codec is in `here/`."""
    whole = tiny_checkpoint("higgs_audio_v2")
    (tmp_path / "model").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "model")
    shutil.copytree(whole / "audio_tokenizer", tmp_path / "here" / "audio_tokenizer")
    monkeypatch.setattr(higgs_files.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("folder", ["here", "here/audio_tokenizer"])
@pytest.mark.parametrize("variable", higgs_files.VARIABLES)
def test_the_environment_may_name_the_codec(
    apart: Path, variable: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-66: the folder or the one above it; it comes before the checkpoint's own."""
    monkeypatch.setenv(variable, str(apart / folder))
    for model in (apart / "model", apart / "here"):
        place, _ = higgs_files.codec_place(LoadContext(str(model), torch.device("cpu")))
        assert place.model == str(apart / "here" / "audio_tokenizer")


def test_the_hubs_cache_may_hold_the_codec(apart: Path) -> None:
    """A-66: whatever the revision, without asking the hub."""
    snapshot = apart / "cache" / "models--k2-fsa--OmniVoice" / "snapshots" / "abc"
    shutil.copytree(apart / "here", snapshot)
    loaded = higgs_audio_v2.load(LoadContext(str(apart / "model"), torch.device("cpu")))
    assert set(loaded.components) == {"decoder", "encoder"}


def test_weight_norms_may_have_their_older_names(apart: Path, loaded: Loaded) -> None:
    file = apart / "here" / "audio_tokenizer" / "model.safetensors"
    norm = ".parametrizations.weight.original"
    older = {norm + "0": ".weight_g", norm + "1": ".weight_v"}
    tensors = {}
    for name, tensor in load_file(file).items():
        for new, old in older.items():
            name = name.replace(new, old)
        tensors[name] = tensor
    assert any(name.endswith(".weight_g") for name in tensors)
    save_file(tensors, file)
    shutil.copy(apart / "model" / "config.json", apart / "here")
    again = higgs_audio_v2.load(LoadContext(str(apart / "here"), torch.device("cpu")))
    for part, component in again.components.items():
        known = loaded.components[part].module.state_dict()
        for name, tensor in component.module.state_dict().items():
            assert torch.equal(tensor, known[name])


def test_no_codec_is_a_configuration_error(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = LoadContext(str(apart / "model"), torch.device("cpu"))
    with pytest.raises(OmniConfigError, match="HIGGS_AUDIO_TOKENIZER_PATH"):
        higgs_audio_v2.load(context)
    monkeypatch.setenv("HIGGS_AUDIO_TOKENIZER_PATH", str(apart / "nowhere"))
    with pytest.raises(OmniConfigError, match="nowhere"):
        higgs_audio_v2.load(context)


def test_a_codec_of_other_frames_is_a_configuration_error(apart: Path) -> None:
    config = json.loads((apart / "model" / "config.json").read_text())
    changed = json.dumps({**config, "num_codebooks": 8})
    (apart / "here" / "config.json").write_text(changed)
    with pytest.raises(OmniConfigError, match="8 codes per frame"):
        higgs_audio_v2.load(LoadContext(str(apart / "here"), torch.device("cpu")))
