# SPDX-License-Identifier: Apache-2.0
"""Weights come from safetensors; pickles need `--trust-remote-code`."""

from pathlib import Path

import pytest

from vllm_omni.ar.launch import engine_config
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.config.secrets import redacted
from vllm_omni.config.weights import safe_load_format
from vllm_omni.errors import OmniConfigError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


def folder(path: Path, *names: str) -> str:
    for name in names:
        (path / name).touch()
    return str(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_need_trust(tmp_path: Path, name: str) -> None:
    model = folder(tmp_path, name)
    with pytest.raises(OmniConfigError, match="--trust-remote-code"):
        safe_load_format({"model": model})
    assert safe_load_format({"model": model, "trust_remote_code": True}) == "auto"
    with pytest.raises(OmniConfigError, match="safetensors"):
        engine_config(ArStageConfig(stage="thinker"), {"model": model})


@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_formats_that_are_pickles_need_trust(load_format: str) -> None:
    args = {"model": "any/model", "load_format": load_format}
    with pytest.raises(OmniConfigError, match="--trust-remote-code"):
        safe_load_format(args)
    assert safe_load_format({**args, "trust_remote_code": True}) == load_format


def test_safetensors_beside_others_are_taken(tmp_path: Path) -> None:
    model = folder(tmp_path, "model.safetensors", "spk_dict.pt", "training.bin")
    assert safe_load_format({"model": model}) == "safetensors"
    assert safe_load_format({"model": "name/on-the-hub"}) == "safetensors"
    assert safe_load_format({"model": model, "load_format": "dummy"}) == "dummy"


def test_secrets_are_hidden() -> None:
    given = {
        "hf_token": "x",
        "max_num_batched_tokens": 5,
        "tokenizer": "t",
        "extra": {"aws_secret": "x", "Api_Key": "x", "list": [1]},
        "token": None,
    }
    assert redacted(given) == {
        "hf_token": "***",
        "max_num_batched_tokens": 5,
        "tokenizer": "t",
        "extra": {"aws_secret": "***", "Api_Key": "***", "list": [1]},
        "token": None,
    }
