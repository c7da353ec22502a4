# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3's codec is v2's; where it is, and what it makes of invalid codes (A-65, A-66)."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2TokenizerConfig

from tests.diffusion.codecs import run_streams
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import higgs_audio_v3, higgs_files
from vllm_omni.diffusion.programs.code2wav import higgs_audio_v3 as HIGGS_AUDIO_V3
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.errors import OmniConfigError
from vllm_omni.inputs import Window

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

GROUPS, FRAMES = 4, 6


def load(folder: Path) -> Loaded:
    return higgs_audio_v3.load(LoadContext(str(folder), torch.device("cpu")))


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("higgs_multimodal_qwen3")


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Loaded:
    return load(checkpoint)


@pytest.fixture
def bundled(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As published: the codec's weights are among the model's, and its config is nowhere."""
    folder = checkpoint / "audio_tokenizer"
    tensors = {
        higgs_audio_v3.PREFIX + name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    sizes = HiggsAudioV2TokenizerConfig.from_pretrained(folder)
    monkeypatch.setattr(higgs_audio_v3, "published_config", lambda: sizes)
    monkeypatch.setattr(higgs_files.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_codec_may_be_in_the_models_own_file(bundled: Path, loaded: Loaded) -> None:
    made = load(bundled)
    for part, component in loaded.components.items():
        known = component.module.state_dict()
        for name, tensor in made.components[part].module.state_dict().items():
            assert torch.equal(tensor, known[name])


def test_what_is_published_fits_published_checkpoints() -> None:
    config = higgs_audio_v3.published_config()
    assert (config.num_quantizers, config.codebook_size) == (8, 1024)
    assert (config.hop_length, config.sample_rate) == (960, 24_000)


@pytest.mark.parametrize("variable", higgs_files.VARIABLES)
def test_the_environment_comes_first(
    bundled: Path, checkpoint: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-66; the order is v2's."""
    elsewhere = bundled / "elsewhere" / "audio_tokenizer"
    shutil.copytree(checkpoint / "audio_tokenizer", elsewhere)
    tensors = load_file(elsewhere / "model.safetensors")
    save_file(
        {name: tensor * 0 for name, tensor in tensors.items()}, elsewhere / "model.safetensors"
    )
    monkeypatch.setenv(variable, str(elsewhere.parent))
    decoder = load(bundled).components["decoder"].module
    assert not any(parameter.any() for parameter in decoder.parameters())


def test_no_codec_is_a_configuration_error(bundled: Path) -> None:
    save_file({"body.norm.weight": torch.ones(1)}, bundled / "model.safetensors")
    with pytest.raises(OmniConfigError, match="HIGGS_AUDIO_TOKENIZER_PATH"):
        load(bundled)


def test_codes_of_none_are_heard_as_the_first(loaded: Loaded) -> None:
    """A-65."""
    rows = torch.randint(1024, (FRAMES + GROUPS - 1, GROUPS), generator=torch.Generator())
    wild = rows.clone()
    wild[2, 1], wild[4, 3], wild[5, 0] = -1, 2000, 1025
    rows[2, 1], rows[4, 3], rows[5, 0] = 0, 0, 0
    window = Window(0, FRAMES, 0, FRAMES, last=True)
    streams = {
        name: [Message(tensors={"codes": codes.int()}, windows=[window], final=True)]
        for name, codes in {"wild": wild, "known": rows}.items()
    }
    made = run_streams(Engine(HIGGS_AUDIO_V3, loaded), streams)
    assert len(made["wild"]) == FRAMES * 960
    torch.testing.assert_close(made["wild"], made["known"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", range(GROUPS))
def test_too_few_rows_are_no_sound(loaded: Loaded, rows: int) -> None:
    """A-65: nothing, and no error; the same of a stream that had no rows at all."""
    tensors = {"codes": torch.full((rows, GROUPS), 1024)} if rows else {}
    engine = Engine(HIGGS_AUDIO_V3, loaded)
    engine.add("r", Message(tensors=tensors, final=True))
    (end,) = engine.step()
    assert end.finished and end.error is None and end.tensors is None
