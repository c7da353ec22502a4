# SPDX-License-Identifier: Apache-2.0
"""The checkpoint: Qwen3-TTS CustomVoice's layout, with sizes of its own.

The text's tokens are its bytes. The codec makes 25 frames of 4 codes a second.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from recipes.demo.tts.voices import VOICES
from vllm_omni.testing.tiny.qwen3_tts import (
    CHAT_TEMPLATE,
    CODEC_PREPROCESSOR,
    NAMED_TOKENS,
    SPECIAL_TOKENS,
)
from vllm_omni.testing.tiny.tokenizer import IM_END, IM_START, qwen2_tokenizer

SAMPLE_RATE = 24_000
HOP = 960
GROUPS = 4
CODEBOOK = 512
BYTES = 256
ROLE = "assistant"
TOKENS = (*SPECIAL_TOKENS, ROLE)
"""Special ones, behind the bytes. The role is one token, as in the published vocabulary."""
LANGUAGE = "english"
_SPECIAL_CODES = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_think_id": 106,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
_LANGUAGE_CODE = 2
_ATTENTION = {
    "attention_bias": False,
    "attention_dropout": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10_000,
    "sliding_window": None,
    "use_sliding_window": False,
}
PREDICTOR = _ATTENTION | {
    "hidden_size": 128,
    "intermediate_size": 384,
    "layer_types": ["full_attention"] * 2,
    "model_type": "qwen3_tts_talker_code_predictor",
    "num_attention_heads": 2,
    "num_code_groups": GROUPS,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_scaling": None,
    "vocab_size": CODEBOOK,
}
TALKER = (
    _ATTENTION
    | {name: CODEBOOK + code for name, code in _SPECIAL_CODES.items()}
    | {
        "code_predictor_config": PREDICTOR,
        "codec_language_id": {LANGUAGE: CODEBOOK + _LANGUAGE_CODE},
        "hidden_size": 256,
        "intermediate_size": 768,
        "model_type": "qwen3_tts_talker",
        "num_attention_heads": 4,
        "num_code_groups": GROUPS,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "position_id_per_seconds": 25,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": [12, 10, 10],
            "rope_type": "default",
            "type": "default",
        },
        "spk_id": {voice.name: CODEBOOK + voice.code for voice in VOICES},
        "spk_is_dialect": {voice.name: False for voice in VOICES},
        "text_hidden_size": 128,
        "text_vocab_size": BYTES + len(TOKENS),
        # Behind the codes there are 1024 special ids, of which only the end is sampled.
        "vocab_size": CODEBOOK + 1024,
    }
)
CODEC = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "decode_upsample_rate": HOP,
    "decoder_config": {
        "codebook_dim": 128,
        "codebook_size": CODEBOOK,
        "decoder_dim": 256,
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 256,
        "latent_dim": 192,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "num_quantizers": GROUPS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000,
        "sliding_window": 16,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2],
    },
    "encode_downsample_rate": HOP,
    "encoder_valid_num_quantizers": GROUPS,
    "input_sample_rate": SAMPLE_RATE,
    "model_type": "qwen3_tts_tokenizer_12hz",
    "output_sample_rate": SAMPLE_RATE,
}
GENERATION = {
    "do_sample": True,
    "max_new_tokens": 1024,
    "repetition_penalty": 1.0,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.5,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "temperature": 0.5,
    "top_k": 50,
    "top_p": 1.0,
}


def token_ids() -> dict[str, int]:
    """Ids of the special tokens."""
    return {token: BYTES + index for index, token in enumerate(TOKENS)}


def whole_config() -> dict[str, Any]:
    """`config.json`."""
    ids = token_ids()
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": ids[ROLE],
        "dtype": "float32",
        "im_end_token_id": ids[IM_END],
        "im_start_token_id": ids[IM_START],
        "model_type": "qwen3_tts",
        "speaker_encoder_config": {},
        "talker_config": TALKER,
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        # The small CustomVoice model takes no instructions either.
        "tts_model_size": "0b6",
        "tts_model_type": "custom_voice",
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "tts_pad_token_id": ids["<tts_pad>"],
    }


def byte_order() -> dict[str, int]:
    """The byte-level alphabet: id of each byte is the byte itself."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in kept]
    letters = {chr(byte): byte for byte in kept}
    letters |= {chr(BYTES + index): byte for index, byte in enumerate(others)}
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return dict(sorted(letters.items(), key=lambda item: item[1]))


def make_tokenizer() -> Qwen2Tokenizer:
    """Bytes and special tokens."""
    vocab = byte_order() | token_ids()
    return qwen2_tokenizer(vocab, [], TOKENS, NAMED_TOKENS, CHAT_TEMPLATE, 4096)


def write_settings(out: Path) -> None:
    """All files of the checkpoint but the weights."""
    codec = out / "speech_tokenizer"
    codec.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save_pretrained(out)
    _write_json(out / "config.json", whole_config())
    _write_json(out / "generation_config.json", GENERATION)
    _write_json(codec / "config.json", CODEC)
    _write_json(codec / "preprocessor_config.json", CODEC_PREPROCESSOR)


def write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A file of weights in half precision; what is not whole is never seen under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    halves = {
        name: each.detach().to("cpu", torch.bfloat16).contiguous() for name, each in tensors.items()
    }
    partial = path.with_name(f"{path.name}.partial")
    save_file(halves, partial, metadata={"format": "pt"})
    partial.replace(path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    write_settings(Path(sys.argv[1]))
