# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3's config: what published files leave out, and what is wrong with others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.build import build_plan
from vllm_omni.config.hf.higgs_audio_v3 import HiggsAudioV3Config
from vllm_omni.errors import OmniConfigError

from .conftest import CPU

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]


@pytest.mark.parametrize("raw", [{}, {"rope_theta": None}, {"rope_parameters": None}])
def test_the_rotary_base_is_qwen3s(raw: dict[str, Any]) -> None:
    """And stays what it is when the config is written and read again."""
    config = HiggsAudioV3Config(text_config=raw)
    assert config.text_config.rope_parameters["rope_theta"] == 1e6
    again = HiggsAudioV3Config.from_dict(config.to_dict())
    assert again.text_config.rope_parameters == config.text_config.rope_parameters
    given = HiggsAudioV3Config(text_config={"rope_theta": 5e5})
    assert given.text_config.rope_parameters["rope_theta"] == 5e5


def test_codes_are_eight_of_1026() -> None:
    """A-60."""
    codes = HiggsAudioV3Config().audio_encoder_config
    assert (codes.num_codebooks, codes.begin, codes.end) == (8, 1024, 1025)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("encoder_type", "whisper", "others transcribe"),
        ("use_delay_pattern", False, "should be true"),
        ("num_codebooks", 0, "at least 1"),
        ("vocab_size", 2, "at least 3"),
        ("out_dim", 63, r"text_config\.hidden_size"),
    ],
)
def test_what_is_none_is_refused(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, key: str, value: Any, told: str
) -> None:
    source = tiny_checkpoint("higgs_multimodal_qwen3")
    for file in source.glob("*.json"):
        shutil.copy(file, tmp_path)
    raw = json.loads((source / "config.json").read_text())
    raw["audio_encoder_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(OmniConfigError, match=rf"audio_encoder_config\.{key}.*{told}"):
        build_plan(str(tmp_path), host=CPU)
