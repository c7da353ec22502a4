# SPDX-License-Identifier: Apache-2.0
"""Broken checkpoints: one clear error with the key at fault, before any stage is started (I-04)."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub import constants
from vllm.transformers_utils import repo_utils

from vllm_omni.config.build import build_plan
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.errors import OmniConfigError

from .conftest import CPU

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

TINY = Callable[[str], Path]


def copied(tiny: Path, folder: Path) -> Path:
    """A checkpoint without weights, to be broken."""
    ignore = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(tiny, folder / tiny.name, ignore=ignore))


def changed(model: Path, path: str, value: Any) -> None:
    """Set a dotted key of the config; None deletes it."""
    file = model / "config.json"
    config = json.loads(file.read_text())
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section[name]
    if value is None:
        del section[key]
    else:
        section[key] = value
    file.write_text(json.dumps(config))


def planned(model: Path, **options: Any) -> DeploymentPlan:
    return build_plan(str(model), host=CPU, **options)


def assert_refused(model: Path, message: str, **options: Any) -> None:
    with pytest.raises(OmniConfigError, match=re.escape(message)) as caught:
        planned(model, **options)
    assert str(model) in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3_omni_moe", "qwen2_5_omni"])
def test_whole_ones_are_taken(family: str, tiny_checkpoint: TINY, tmp_path: Path) -> None:
    assert planned(copied(tiny_checkpoint(family), tmp_path)).pipeline.name == family


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("talker_config", None, "should be the config of stage 'talker'"),
        ("talker_config", 3, "its config cannot be loaded"),
        ("code2wav_config", None, "should be the config of stage 'code2wav'"),
        ("talker_config.accept_hidden_layer", 4, "= 4: should be an integer from 0 to 3"),
        ("talker_config.accept_hidden_layer", -1, "= -1: should be an integer from 0 to 3"),
        ("talker_config.speaker_id", {}, "= {}: should name at least one speaker"),
        ("talker_config.speaker_id", {"ethan": 9999}, ".ethan = 9999: should be an integer"),
        ("talker_config.codec_eos_token_id", 3072, "= 3072: should be an integer from 0 to 3071"),
        ("talker_config.codec_bos_id", -5, "= -5: should be an integer"),
        ("talker_config.thinker_hidden_size", 64, "= 64: should equal thinker_config.text_config"),
        ("talker_config.num_code_groups", 5, "= 5: should equal code2wav_config.num_quantizers"),
        ("tts_eos_token_id", 512, "= 512: should be an integer from 0 to 511"),
    ],
)
def test_qwen3_configs(
    key: str, value: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path
) -> None:
    model = copied(tiny_checkpoint("qwen3_omni_moe"), tmp_path)
    changed(model, key, value)
    assert_refused(model, key + says if says.startswith((".", " ")) else says)
    assert_refused(model, key.split(".")[-1])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("talker_config", None, "should be the config of stage 'talker'"),
        ("token2wav_config", None, "should be the config of stage 'code2wav'"),
        ("talker_config.tts_codec_end_token_id", 8448, "from 0 to 8447"),
        ("talker_config.tts_codec_start_token_id", 9000, "from 0 to 8447"),
        ("talker_config.tts_text_end_token_id", 512, "from 0 to 511"),
        ("talker_config.embedding_size", 64, "should equal thinker_config.text_config.hidden_size"),
    ],
)
def test_qwen2_5_configs(
    key: str, value: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path
) -> None:
    model = copied(tiny_checkpoint("qwen2_5_omni"), tmp_path)
    changed(model, key, value)
    assert_refused(model, says)
    assert_refused(model, key)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("codec_config", None, "should be the config of stage 'code2wav'"),
        ("codec_config.num_quantizers", 8, "should equal codec_config.num_quantizers, which is 8"),
        ("depth_decoder_config.vocab_size", 2052, "should equal vocab_size, which is 2051"),
        ("depth_decoder_config.backbone_hidden_size", 32, "should equal hidden_size, which is 64"),
        ("codec_config.codebook_size", 2050, "should be at least 2052"),
        ("tie_codebooks_embeddings", False, "should be true"),
        ("codebook_eos_token_id", 2050, "from 0 to 2047"),
    ],
)
def test_csm_configs(
    key: str, value: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path
) -> None:
    model = copied(tiny_checkpoint("csm"), tmp_path)
    changed(model, key, value)
    assert_refused(model, says)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("audio_token_id", 9999, "from 0 to 404"),
        ("text_config.vocab_size", 402, "from 0 to 401"),
        ("semantic_model_config.downsampling_ratios", [2, 2, 4, 5, 5, 4], "should equal"),
    ],
)
def test_vibevoice_configs(
    key: str, value: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path
) -> None:
    model = copied(tiny_checkpoint("vibevoice"), tmp_path)
    changed(model, key, value)
    assert_refused(model, says)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lm_config.vocab_size", 100, "= 100: should be more than 104"),
        ("feat_dim", 32, "= 32: should equal audio_vae_config.latent_dim, which is 16"),
        ("audio_vae_config.use_noise_block", True, "should be False: no other is known"),
    ],
)
def test_voxcpm2_configs(
    key: str, value: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path
) -> None:
    model = copied(tiny_checkpoint("voxcpm2"), tmp_path)
    (model / "audiovae.safetensors").touch()
    changed(model, key, value)
    assert_refused(model, says)
    assert_refused(model, key)


VOICE = {"cond": torch.zeros(1, 16), "ref_mel": torch.zeros(1, 9, 80), "bos_token": 5}


@pytest.mark.parametrize(
    ("speakers", "says"),
    [
        (None, "it has no spk_dict.pt"),
        (b"garbage", "cannot be read as tensors"),
        (b"", "cannot be read as tensors"),
        ([], "should hold speakers by name"),
        ({}, "should hold speakers by name, and at least one"),
        ({"Ethan": 3}, "Ethan.bos_token = None: should be a token id"),
        ({"Ethan": {**VOICE, "bos_token": "x"}}, "Ethan.bos_token = 'x': should be a token id"),
        ({"Ethan": {**VOICE, "bos_token": 512}}, "Ethan.bos_token = 512: should be an integer"),
        ({"Ethan": {**VOICE, "cond": torch.zeros(16)}}, "Ethan.cond: should be a tensor of 2"),
        ({"Ethan": {**VOICE, "cond": torch.zeros(1, 8)}}, "Ethan.cond's width = 8: should equal"),
        (
            {"Ethan": {**VOICE, "ref_mel": torch.full((1, 9, 80), torch.nan)}},
            "Ethan.ref_mel: should be a tensor of 3 dimensions with finite numbers",
        ),
    ],
)
def test_qwen2_5_speakers(speakers: Any, says: str, tiny_checkpoint: TINY, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("qwen2_5_omni"), tmp_path)
    file = model / "spk_dict.pt"
    file.unlink()
    if isinstance(speakers, bytes):
        file.write_bytes(speakers)
    elif speakers is not None:
        torch.save(speakers, file)
    assert_refused(model, says)


class Boom:
    """Runs code when it is unpickled by a reader that trusts the file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/vllm-omni-pickle-ran"),))


def test_nothing_in_a_speakers_file_is_executed(tiny_checkpoint: TINY, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("qwen2_5_omni"), tmp_path)
    torch.save({"Ethan": Boom()}, model / "spk_dict.pt")
    assert_refused(model, "cannot be read as tensors")
    assert not Path("/tmp/vllm-omni-pickle-ran").exists()


@pytest.mark.parametrize("family", ["qwen3_omni_moe", "qwen2_5_omni"])
@pytest.mark.parametrize("name", ["tokenizer.json", "preprocessor_config.json"])
def test_missing_files(family: str, name: str, tiny_checkpoint: TINY, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint(family), tmp_path)
    (model / name).unlink()
    assert_refused(model, f"it has no {name} or")


def test_a_tokenizer_from_elsewhere(tiny_checkpoint: TINY, tmp_path: Path) -> None:
    tiny = tiny_checkpoint("qwen3_omni_moe")
    model = copied(tiny, tmp_path)
    (model / "tokenizer.json").unlink()
    assert planned(model, cli={"tokenizer": str(tiny)}).stages[0].engine_args["tokenizer"]


def test_a_pipeline_for_another_family(tiny_checkpoint: TINY, tmp_path: Path) -> None:
    model = copied(tiny_checkpoint("qwen3_omni_moe"), tmp_path)
    assert_refused(model, "token2wav_config", deploy_config={"pipeline": "qwen2_5_omni"})


@pytest.mark.parametrize("name", ["./nope", ".work/nope", "some/where/else", "nope/"])
def test_a_path_to_nowhere(name: str) -> None:
    with pytest.raises(OmniConfigError, match="there is no such folder"):
        build_plan(name, host=CPU)


def test_a_hub_that_may_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OmniConfigError, match=r"'nobody/nothing'.*HF_HUB_OFFLINE") as caught:
        build_plan("nobody/nothing", host=CPU)
    assert len(str(caught.value).splitlines()) == 1


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object) -> bool:
        raise httpx2.ConnectError("[Errno 101] Network is unreachable")

    monkeypatch.setattr(repo_utils, "file_or_path_exists", unreachable)
    with pytest.raises(OmniConfigError, match=r"'nobody/nothing'.*hub cannot be reached.*Network"):
        build_plan("nobody/nothing", host=CPU)
