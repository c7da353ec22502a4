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


def qwen3_omni(out: Path) -> Path:
    """Qwen3-Omni-30B-A3B-Instruct (sizes of the published config), without weights.

    Texts are cut by the tiny checkpoints' tokenizer, whose ids are a part of the vocabulary.
    """
    if (out / "complete").exists():
        return out
    from transformers import GenerationConfig

    from vllm_omni.testing.tiny import qwen3_omni_moe as tiny
    from vllm_omni.testing.tiny.processor import write_processor
    from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, make_tokenizer

    tokenizer = make_tokenizer(tiny.SPECIAL_TOKENS, tiny.NAMED_TOKENS, tiny.CHAT_TEMPLATE)
    ids: dict[str, Any] = tokenizer.get_vocab()
    config = tiny.config(ids).to_dict()
    thinker, talker = config["thinker_config"], config["talker_config"]
    rope = {"mrope_section": [24, 20, 20]}
    thinker["text_config"].update(
        vocab_size=152_064,
        head_dim=128,
        num_experts=128,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts_per_tok=8,
    )
    thinker["text_config"]["rope_parameters"].update(rope)
    thinker["audio_config"].update(
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
        output_dim=2048,
        downsample_hidden_size=480,
    )
    thinker["vision_config"].update(
        depth=27,
        hidden_size=1152,
        intermediate_size=4304,
        num_heads=16,
        out_hidden_size=2048,
        num_position_embeddings=2304,
        deepstack_visual_indexes=[8, 16, 24],
        image_size=768,
    )
    talker.update(num_code_groups=16, thinker_hidden_size=2048, accept_hidden_layer=24)
    talker["text_config"].update(
        head_dim=128,
        num_local_experts=128,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=384,
        shared_expert_intermediate_size=768,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts_per_tok=6,
    )
    talker["text_config"]["rope_parameters"].update(rope)
    talker["code_predictor_config"].update(
        num_code_groups=16,
        head_dim=128,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention"] * 5,
    )
    config["code2wav_config"].update(
        num_quantizers=16,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        sliding_window=72,
        decoder_dim=1536,
    )
    whole = type(tiny.config(ids)).from_dict({**config, "dtype": "bfloat16"})
    whole.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    out.mkdir(parents=True, exist_ok=True)
    whole.save_pretrained(out)
    GenerationConfig(eos_token_id=ids[IM_END], pad_token_id=ids[END_OF_TEXT]).save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_processor(out, "Qwen3OmniMoeProcessor", 16, mean=[0.5] * 3, std=[0.5] * 3)
    (out / "complete").touch()
    return out
