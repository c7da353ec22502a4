# SPDX-License-Identifier: Apache-2.0
"""Tiny Higgs-Audio v2 (reference: transformers' `HiggsAudioV2ForConditionalGeneration`).

The codes keep their real ids (1024 of them, begin and end after these) and the real frame rate (960
samples a frame); sizes, depths and the number of codebooks are reduced. The codec is a folder of
the checkpoint, so nothing else is needed to run it.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from vllm_omni.testing.tiny.higgs_codec import (
    CODES,
    GROUPS,
    codec_config,
    codec_generator,
    make_codec,
)
from vllm_omni.testing.tiny.tokenizer import make_tokenizer
from vllm_omni.testing.tiny.weights import (
    randomize,
    save_tensors,
    shape_logits,
    write_json,
)

SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
    "<|audio_out_bos|>",
    "<|AUDIO_OUT|>",
    "<|audio_eos|>",
    "<|reserved_special_token_6|>",
)
CHAT_TEMPLATE = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{{- messages[0].content | trim -}}
{{- '\\n\\n<|scene_desc_start|>\\n' + messages[1].content | trim + '\\n<|scene_desc_end|>' -}}
{{- '<|eot_id|>' -}}
{%- for message in messages[2:] -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
    {%- if message.role == 'assistant' -%}
        {{- '<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>' -}}
    {%- else -%}
        {{- message.content | trim -}}
    {%- endif -%}
    {{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n<|audio_out_bos|>' -}}
{%- endif -%}
"""
"""The published one's text, for a system message and a scene."""

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on most texts.
BASE_SEED = 7
TEXT_VOCAB = 512
BEGIN_CODE, END_CODE = 1024, 1025
STOP = 1.75
"""Factor on the logit of the end code."""
REPETITION = {"ras_win_len": 7, "ras_win_max_num_repeat": 2}
"""As published. transformers draws anew under greedy decoding, too, unless told not to."""


def config(token_id: dict[str, int]) -> dict[str, Any]:
    """`config.json` as transformers writes it; `token_id` maps special tokens to ids."""
    return {
        "architectures": ["HiggsAudioV2ForConditionalGeneration"],
        "attention_bias": False,
        "audio_bos_token_id": token_id["<|audio_out_bos|>"],
        "audio_delay_token_id": token_id["<|reserved_special_token_6|>"],
        "audio_stream_bos_id": BEGIN_CODE,
        "audio_stream_eos_id": END_CODE,
        "audio_token_id": token_id["<|AUDIO_OUT|>"],
        "bos_token_id": token_id["<|begin_of_text|>"],
        "codebook_size": CODES + 2,
        "dtype": "float32",
        "eos_token_id": token_id["<|eot_id|>"],
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "higgs_audio_v2",
        "num_attention_heads": 4,
        "num_codebooks": GROUPS,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": token_id["<|end_of_text|>"],
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 0.5,
            "low_freq_factor": 0.125,
            "original_max_position_embeddings": 1024,
            "rope_theta": 500_000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "vocab_size": TEXT_VOCAB,
    }


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS, {}, CHAT_TEMPLATE)
    tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.eos_token = tokenizer.pad_token = "<|end_of_text|>"
    tokenizer.save_pretrained(out)
    whole = config(tokenizer.get_vocab())
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    codec = out / "audio_tokenizer"
    codec.mkdir()
    write_json(out / "config.json", whole)
    generation = {"eos_token_id": whole["eos_token_id"], **REPETITION}
    write_json(out / "generation_config.json", generation)
    write_json(codec / "config.json", codec_config())
    model = make_model(HiggsAudioV2Config(**whole), generator)
    save_tensors(model.state_dict(), out / "model.safetensors")
    save_tensors(make_codec(codec_generator(seed)), codec / "model.safetensors")


def make_model(
    config: HiggsAudioV2Config, generator: torch.Generator
) -> HiggsAudioV2ForConditionalGeneration:
    """The codec language model with weights."""
    model = HiggsAudioV2ForConditionalGeneration(config)
    randomize(model, generator)
    with torch.no_grad():
        # A row is the sum of its codes' embeddings.
        model.model.embed_audio_tokens.embed_audio_tokens.weight.mul_(GROUPS**-0.5)
    # Only the first group says the end by itself; the others' end would stop speech too often.
    ends = [group * config.codebook_size + END_CODE for group in range(GROUPS)]
    begins = [group * config.codebook_size + BEGIN_CODE for group in range(GROUPS)]
    shape_logits(model.audio_lm_head, spread=3.0, stop={ends[0]: STOP}, silent=[*ends[1:], *begins])
    return model
