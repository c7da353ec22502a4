# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of published sizes with random weights, for GPU benchmarks.

Language models get no weights (`load_format: dummy` makes them on the device); codecs do.
"""

from pathlib import Path
from typing import Any


def qwen3_tts(out: Path) -> Path:
    """Qwen3-TTS-12Hz-1.7B-CustomVoice with its 12.5 Hz codec (sizes of the published configs).

    Texts are cut by the tiny checkpoints' tokenizer, whose ids are a part of the vocabulary.
    """
    from vllm_omni.testing.tiny import qwen3_tts as tiny

    if (out / "complete").exists():
        return out
    attention = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}

    def config(ids: dict[str, int]) -> dict[str, Any]:
        whole = tiny.config("custom_voice", ids)
        whole["dtype"] = "bfloat16"
        talker = whole["talker_config"]
        talker.update(attention, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28)
        talker.update(num_code_groups=16, text_hidden_size=2048, text_vocab_size=151_936)
        talker["rope_scaling"]["mrope_section"] = [24, 20, 20]
        predictor = talker["code_predictor_config"]
        predictor.update(attention, hidden_size=1024, intermediate_size=3072, num_hidden_layers=5)
        predictor.update(num_code_groups=16, layer_types=["full_attention"] * 5)
        return whole

    codec = tiny.codec_config()
    codec["encoder_valid_num_quantizers"] = 16
    codec["encoder_config"]["num_quantizers"] = 16
    codec["decoder_config"].update(
        codebook_dim=512,
        decoder_dim=1536,
        head_dim=64,
        hidden_size=1024,
        intermediate_size=3072,
        latent_dim=1024,
        num_attention_heads=16,
        num_hidden_layers=8,
        num_key_value_heads=16,
        num_quantizers=16,
        sliding_window=72,
    )
    out.mkdir(parents=True, exist_ok=True)
    tiny.write_of_sizes(out, 0, config, codec, stop=None)
    (out / "complete").touch()
    return out
