# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS's codec equals its published code written down plainly, streamed and batched (A-68)."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.diffusion.codecs import cut, encode, random_codes, run_streams
from tests.diffusion.schedulers import unhurried
from tests.reference.plain_moss_codec import PlainMossCodec
from vllm_omni.config.hf.moss_tts import MossAudioTokenizerConfig
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import moss_files, moss_tts
from vllm_omni.diffusion.programs.code2wav import moss_tts as MOSS_TTS
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.models.moss_codec import MossDecoder, TransformerSpec, decoder_specs, encoder_specs
from vllm_omni.speech.delay import delayed
from vllm_omni.testing.media import sound

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

RATE, HOP = 24_000, 1920
GROUPS, PAD = 4, 1024
LAG = GROUPS - 1
FRAMES = 41
"""More than eight windows of attention."""
POLICIES = {
    "usual": ChunkPolicy(initial=2, steady=25),
    "small": ChunkPolicy(initial=1, steady=1),
    "whole": ChunkPolicy.one_shot(),
}
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("moss_tts")


def load(folder: Path) -> Loaded:
    return moss_tts.load(LoadContext(str(folder), torch.device("cpu")))


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Loaded:
    return load(checkpoint)


@pytest.fixture(scope="module")
def decoder(loaded: Loaded) -> MossDecoder:
    module = loaded.components["decoder"].module
    assert isinstance(module, MossDecoder)
    return module


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> PlainMossCodec:
    return PlainMossCodec(checkpoint / "audio_tokenizer")


def some_codes(frames: int, seed: int) -> torch.Tensor:
    """int32 [frames, groups]."""
    return random_codes(frames, GROUPS, seed, 1024)


def stream(codes: torch.Tensor, policy: ChunkPolicy, silent: int = 1) -> list[Message]:
    """The messages of frames that come as rows, some without codes before them."""
    rows = delayed(codes, tuple(range(GROUPS)), PAD, PAD)[:-1]
    rows = torch.cat([rows.new_full((silent, GROUPS), PAD), rows])
    messages = []
    for message in cut(codes, policy, 3):
        first = not messages
        start = message.start + (0 if first else LAG + silent)
        stop = message.start + len(message.tensors["codes"]) + LAG + silent
        messages.append(replace(message, tensors={"codes": rows[start:stop]}, start=start))
    return messages


# Decoding.


@torch.inference_mode()
def test_decoding_is_one_function(decoder: MossDecoder, plain: PlainMossCodec) -> None:
    """A-68: of [groups, frames], whatever its strides; no frames are no samples."""
    codes = some_codes(FRAMES, 0).long()
    assert_equal(decoder.decode(codes.T[None])[0], plain.decode(codes))
    both = torch.stack([codes, some_codes(FRAMES, 1).long()]).transpose(1, 2)
    assert not both.is_contiguous()
    assert_equal(decoder.decode(both)[0], plain.decode(codes))
    assert decoder.decode(both[..., :0]).shape == (2, 0)


def test_streams_are_the_one_shot_decode(loaded: Loaded, plain: PlainMossCodec) -> None:
    """In any pieces, all of them together, at whatever point each is; text before the sound or
    not."""
    lengths = {"usual": FRAMES, "small": 7, "whole": 2 * moss_tts.MOST_FRAMES + 1}
    codes = {name: some_codes(count, index) for index, (name, count) in enumerate(lengths.items())}
    streams = {name: stream(codes[name], POLICIES[name], silent=len(name) - 5) for name in codes}
    made = run_streams(Engine(MOSS_TTS, loaded, scheduler=unhurried()), streams)
    for name, samples in made.items():
        assert_equal(samples, plain.decode(codes[name].long()))


def test_codes_out_of_range_are_heard_as_the_nearest(loaded: Loaded, plain: PlainMossCodec) -> None:
    """A-68."""
    codes = some_codes(6, 3)
    wild = codes.clone()
    wild[2, 1], wild[4, 3] = -7, 2000
    made = run_streams(Engine(MOSS_TTS, loaded), {"r": stream(wild, POLICIES["usual"])})
    codes[2, 1], codes[4, 3] = 0, 1023
    assert_equal(made["r"], plain.decode(codes.long()))


@pytest.mark.parametrize("rows", range(GROUPS))
def test_no_frames_are_no_sound(loaded: Loaded, rows: int) -> None:
    """A-68: and no error; the same of a stream that had no rows at all."""
    tensors = {"codes": torch.full((rows, GROUPS), PAD)} if rows else {}
    engine = Engine(MOSS_TTS, loaded)
    engine.add("r", Message(tensors=tensors, final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None


# Encoding.


def test_recordings_are_encoded_as_the_reference_does(
    loaded: Loaded, plain: PlainMossCodec
) -> None:
    """Soft and loud ones, alone and all together: of several lengths in one forward."""
    sounds = {
        "soft": 0.1 * torch.from_numpy(sound(1.2, RATE, 7)),
        "loud": torch.from_numpy(sound(1.337, RATE, 8)),
    }
    engine = Engine(MOSS_TTS, loaded, scheduler=unhurried())
    made = encode(engine, {name: {"reference.0": samples} for name, samples in sounds.items()})
    assert engine.forward_sizes == {2: 1}
    for name, emission in made.items():
        assert emission.modality == "reference" and emission.error is None
        assert emission.tensors is not None
        codes = emission.tensors["codes"]
        assert codes.dtype == torch.int32
        assert codes.tolist() == plain.encode(sounds[name], GROUPS).tolist()
        assert emission.meta["frames"] == len(codes) == len(sounds[name]) // HOP


def test_bad_recordings_are_the_clients_fault(loaded: Loaded) -> None:
    for samples, told in (
        (torch.zeros(HOP - 1), "too short"),
        (torch.full((RATE,), float("nan")), "no numbers"),
    ):
        (end,) = encode(Engine(MOSS_TTS, loaded), {"r": {"reference.0": samples}}).values()
        assert end.error is not None and end.error.status_code == 400
        assert told in end.error.message


# Where the codec is, and what it may be.


@pytest.fixture
def apart(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint without a codec, which is in `codec/`."""
    (tmp_path / "model").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "model")
    shutil.copytree(checkpoint / "audio_tokenizer", tmp_path / "codec")
    return tmp_path


def test_the_codec_has_a_repository_of_its_own(
    apart: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment comes first, then the checkpoint, then what its processor names."""

    def place(folder: Path) -> tuple[str, str]:
        found, inner = moss_files.codec_place(LoadContext(str(folder), torch.device("cpu")))
        return found.model, inner

    model = apart / "model"
    assert place(model) == (moss_files.REPOSITORY, "")
    processor = model / "processor_config.json"
    for settings in (
        {"audio_tokenizer_name_or_path": "some/codec"},
        {"audio_tokenizer": {"audio_tokenizer_name_or_path": "some/codec"}},
    ):
        processor.write_text(json.dumps(settings))
        assert place(model) == ("some/codec", "")
    assert place(checkpoint) == (str(checkpoint), "audio_tokenizer")
    monkeypatch.setenv(moss_files.VARIABLE, str(apart / "codec"))
    assert place(checkpoint) == (str(apart / "codec"), "")
    assert set(load(model).components) == {"decoder", "encoder"}


def test_parameters_may_have_their_older_names(
    apart: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = apart / "codec" / "model.safetensors"
    older = {
        ".parametrizations.weight.original0": ".weight_g",
        ".parametrizations.weight.original1": ".weight_v",
        ".in_projs.0.weight": ".in_proj_weight",
        ".out_projs.0.weight": ".out_proj.weight",
    }
    tensors = {}
    for name, tensor in load_file(file).items():
        for new, old in older.items():
            name = name.replace(new, old)
        tensors[name] = tensor
    save_file(tensors, file)
    monkeypatch.setenv(moss_files.VARIABLE, str(apart / "codec"))
    again = load(apart / "model")
    for part, component in again.components.items():
        known = loaded.components[part].module.state_dict()
        for name, tensor in component.module.state_dict().items():
            assert torch.equal(tensor, known[name])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"number_channels": 2}, "one channel"),
        ({"quantizer_kwargs": {"num_quantizers": 3}}, "makes 4 codes per frame"),
        ({"decoder_kwargs": [{"module_type": "Wavelet"}]}, "Wavelet"),
        ({"decoder_kwargs": [{"module_type": "Transformer", "norm": "odd"}]}, "norm 'odd'"),
    ],
)
def test_other_codecs_are_refused(
    apart: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str
) -> None:
    file = apart / "codec" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    monkeypatch.setenv(moss_files.VARIABLE, str(apart / "codec"))
    with pytest.raises(OmniConfigError, match=told):
        load(apart / "model")


def test_windows_are_ten_seconds_at_every_rate() -> None:
    """Of the published codec: 125 positions of frames, up to 1000 of the fastest transformer."""
    part = {
        "module_type": "Transformer",
        "input_dimension": 8,
        "output_dimension": 8,
        "d_model": 8,
        "num_heads": 2,
        "num_layers": 1,
        "dim_feedforward": 8,
    }
    patches = [
        {"module_type": "PatchedPretransform", "patch_size": size} for size in (240, 2, 2, 2)
    ]
    modules = [each for patch in patches for each in (patch, part)]
    config = MossAudioTokenizerConfig(encoder_kwargs=modules, decoder_kwargs=modules[::-1])
    for specs, windows in (
        (encoder_specs(config), [1000, 500, 250, 125]),
        (decoder_specs(config), [125, 250, 500, 1000]),
    ):
        found = [spec.window for spec in specs if isinstance(spec, TransformerSpec)]
        assert found == windows
