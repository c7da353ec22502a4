# SPDX-License-Identifier: Apache-2.0
"""Configs of Qwen3-TTS checkpoints, as the hub has them, are read (B-M50..52)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.hf import Qwen3TTSConfig, register_configs

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

KINDS = ("base", "custom_voice", "voice_design")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    folder = tiny_checkpoint(f"qwen3_tts_{kind}")
    written = json.loads((folder / "config.json").read_text())
    config = load_hf_config(str(folder))
    assert isinstance(config, Qwen3TTSConfig)
    assert config.tts_model_type == kind
    talker, expected = config.talker_config, written["talker_config"]
    assert talker.spk_id == expected["spk_id"]
    assert talker.codec_language_id == expected["codec_language_id"]
    # Rotary settings have moved to one place; nothing else has.
    assert talker.rope_parameters["rope_theta"] == expected["rope_theta"]
    assert talker.rope_parameters["mrope_section"] == expected["rope_scaling"]["mrope_section"]
    predictor = talker.code_predictor_config
    assert predictor.rope_parameters["rope_theta"] == 1_000_000
    assert predictor.num_code_groups == talker.num_code_groups == 4
    assert config.get_text_config() is talker


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    register_configs()
    config = Qwen3TTSConfig(
        talker_config={
            "sliding_window": 4096,
            "code_predictor_config": {"sliding_window": 4096, "max_window_layers": 2},
        },
        tts_model_type="base",
    )
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, Qwen3TTSConfig)
    for each in (config.talker_config, again.talker_config):
        # A window that is not used is none.
        assert each.sliding_window is None
        assert each.code_predictor_config.sliding_window is None
        assert set(each.code_predictor_config.layer_types) == {"full_attention"}
    assert again.speaker_encoder_config.enc_dim == config.speaker_encoder_config.enc_dim == 1024
