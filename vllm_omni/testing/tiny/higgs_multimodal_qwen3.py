# SPDX-License-Identifier: Apache-2.0
"""Tiny Higgs-Audio v3, named and laid out as `bosonai/higgs-audio-v3-tts-4b`.

The codes keep their real ids (1024 of them, begin and end after these); sizes, depths and the
number of codebooks are reduced. The codec is v2's; as its sizes are not the published ones, it is a
folder of the checkpoint, which a published checkpoint has not.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3Model

from vllm_omni.testing.tiny.higgs_codec import (
    CODES,
    GROUPS,
    codec_config,
    codec_generator,
    make_codec,
)
from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, make_tokenizer
from vllm_omni.testing.tiny.weights import randomize, save_tensors, write_json

SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    IM_END,
    "<|tts|>",
    "<|ref_text|>",
    "<|ref_audio|>",
    "<|text|>",
    "<|audio|>",
    "<|emotion:elation|>",
    "<|prosody:pause|>",
)

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on some texts.
BASE_SEED = 0
WIDTH = 64
BEGIN_CODE, END_CODE = CODES, CODES + 1
STOP = 1.6
"""Factor on the logit of the end code."""


def config(vocab_size: int) -> dict[str, Any]:
    """`config.json`."""
    return {
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "audio_encoder_config": {
            "encoder_type": "discrete",
            "model_type": "higgs_audio_encoder",
            "num_codebooks": GROUPS,
            "out_dim": WIDTH,
            "tie_word_embeddings": True,
            "use_delay_pattern": True,
            "vocab_size": CODES + 2,
        },
        "audio_token_id": -100,
        "dtype": "float32",
        "model_type": "higgs_multimodal_qwen3",
        "text_config": {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "max_position_embeddings": 4096,
            "model_type": "qwen3",
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": None,
            "tie_word_embeddings": True,
            "vocab_size": vocab_size,
        },
    }


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS, {}, "")
    tokenizer.save_pretrained(out)
    whole = config(len(tokenizer))
    write_json(out / "config.json", whole)
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    save_tensors(make_model(whole["text_config"], generator), out / "model.safetensors")
    codec = out / "audio_tokenizer"
    codec.mkdir()
    write_json(codec / "config.json", codec_config())
    save_tensors(make_codec(codec_generator(seed)), codec / "model.safetensors")


@torch.no_grad()
def make_model(text_config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The codec language model's weights."""
    backbone = Qwen3Model(Qwen3Config(**{**text_config, "rope_theta": 1_000_000.0}))
    randomize(backbone, generator)
    # Heads are the embeddings: without this a random model says again what it was fed.
    signs = torch.randint(2, (WIDTH,), generator=generator) * 2 - 1
    backbone.norm.weight.mul_(signs)
    # Of what is embedded, a row is the sum; of what is drawn from, logits spread over some units.
    table = torch.randn(GROUPS * (CODES + 2), WIDTH, generator=generator) * GROUPS**-0.5
    table[END_CODE] *= STOP
    tensors = {"tied.embedding.modality_embeddings.0.embedding.weight": table}
    for name, tensor in backbone.state_dict().items():
        if name == "embed_tokens.weight":
            tensors["tied.embedding.text_embedding.weight"] = tensor
        else:
            tensors[f"body.{name}"] = tensor
    return tensors
