# SPDX-License-Identifier: Apache-2.0
"""Tiny CSM (reference: transformers 5), with Mimi at its real frame rate.

Codes keep their real ids (codebook 2048, vocabulary 2051, end 0), and the depth decoder its real
rotary scaling; sizes, depths and the number of codebooks are reduced.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    CsmProcessor,
    EncodecFeatureExtractor,
    MimiModel,
    Qwen2Tokenizer,
)

from vllm_omni.testing.tiny.mimi import fill_mimi_encoder
from vllm_omni.testing.tiny.tokenizer import make_tokenizer
from vllm_omni.testing.tiny.weights import randomize, set_level, shape_logits

BEGIN, END, AUDIO, AUDIO_END = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|AUDIO|>",
    "<|audio_eos|>",
)
NAMED_TOKENS = {"audio_token": AUDIO, "audio_eos_token": AUDIO_END}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- bos_token + '[' + message.role + ']' + message.content[0].text + eos_token -}}
    {%- if message.content | length > 1 -%}
        {{- '<|AUDIO|><|audio_eos|>' -}}
    {%- endif -%}
{%- endfor -%}
"""

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on some texts.
BASE_SEED = 1
CODEBOOKS = 4
CODEBOOK = 2048
VOCABULARY = CODEBOOK + 3
NO_CODES = range(CODEBOOK, VOCABULARY)
"""The codec knows none of these; that a trained model does not say them has to be arranged."""
WIDTH = 64
HEAD_DIM = 32
DEPTH_WIDTH = 48
STOP = 2.3
"""Factor on the logit of the end in the first code."""
FOLLOW = (1.0, 1.0, 0.552)
"""How sure the depth decoder is of a further end after those of a frame's first codes."""
MARK = 6.0
"""Likewise, how much the embedding of an end stands out."""
SAMPLE_RATE = 24_000


def config(token_id: dict[str, int]) -> dict[str, Any]:
    """`config.json`; `token_id` maps special tokens to ids."""
    attention = {
        "attention_bias": False,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_codebooks": CODEBOOKS,
        "rms_norm_eps": 1e-05,
        "vocab_size": VOCABULARY,
    }
    depth = {
        **attention,
        "backbone_hidden_size": WIDTH,
        "head_dim": 16,
        "hidden_size": DEPTH_WIDTH,
        "intermediate_size": 96,
        "max_position_embeddings": 33,
        "model_type": "csm_depth_decoder_model",
        "num_attention_heads": 4,
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 0.0078125,
            "low_freq_factor": 0.001953125,
            "original_max_position_embeddings": 16,
            "rope_theta": 500_000,
            "rope_type": "llama3",
        },
    }
    codec = {
        "codebook_dim": 16,
        "codebook_size": CODEBOOK,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "model_type": "mimi",
        "num_attention_heads": 2,
        "num_filters": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_quantizers": CODEBOOKS,
        "sliding_window": 12,
        "upsample_groups": 32,
        "vector_quantization_hidden_dimension": 16,
    }
    return {
        **attention,
        "architectures": ["CsmForConditionalGeneration"],
        "audio_eos_token_id": token_id[AUDIO_END],
        "audio_token_id": token_id[AUDIO],
        "bos_token_id": token_id[BEGIN],
        "codebook_eos_token_id": 0,
        "codebook_pad_token_id": VOCABULARY - 1,
        "codec_config": codec,
        "depth_decoder_config": depth,
        "dtype": "float32",
        "head_dim": HEAD_DIM,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "model_type": "csm",
        "num_attention_heads": 4,
        "pad_token_id": token_id[AUDIO],
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 0.5,
            "low_freq_factor": 0.125,
            "original_max_position_embeddings": 1024,
            "rope_theta": 500_000,
            "rope_type": "llama3",
        },
        "text_vocab_size": len(token_id),
        "tie_codebooks_embeddings": True,
    }


GENERATION_CONFIG = {
    "depth_decoder_do_sample": True,
    "depth_decoder_temperature": 0.9,
    "depth_decoder_top_k": 50,
    "do_sample": True,
    "max_new_tokens": 125,
    "temperature": 0.9,
    "top_k": 50,
}


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    tokenizer = _tokenizer()
    whole = config(tokenizer.get_vocab())
    model = make_model(CsmConfig(**whole), torch.Generator().manual_seed(BASE_SEED + seed))
    model.save_pretrained(out)
    extractor = EncodecFeatureExtractor(feature_size=1, sampling_rate=SAMPLE_RATE)
    CsmProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")


def make_model(config: CsmConfig, generator: torch.Generator) -> CsmForConditionalGeneration:
    """The model with weights."""
    model = CsmForConditionalGeneration(config).eval()
    randomize(model, generator)
    shape_logits(model.lm_head, spread=3.0, stop={0: STOP}, silent=NO_CODES)
    with torch.no_grad():
        _let_ends_follow(model, generator)
    fill_codec(model.codec_model, generator)
    return model


def _let_ends_follow(model: CsmForConditionalGeneration, generator: torch.Generator) -> None:
    """Have the depth decoder go on with ends after those of a frame's first codes."""
    depth = model.depth_decoder
    table = depth.model.embed_tokens.weight
    heads = depth.codebooks_head.weight
    heads.copy_(torch.randn(heads.shape, generator=generator) * (4.0 / DEPTH_WIDTH**0.5))
    heads[..., NO_CODES] = 0
    mark = torch.randn(WIDTH, generator=generator)
    table[torch.arange(CODEBOOKS) * VOCABULARY] = MARK * mark
    seen = nn.functional.normalize(depth.model.inputs_embeds_projector(mark), dim=0)
    for head, follow in zip(heads, FOLLOW, strict=True):
        head[:, 0] = 4.0 * follow * seen
    model.backbone_model.embed_tokens.embed_audio_tokens.weight.copy_(table)


@torch.no_grad()
def fill_codec(codec: MimiModel, generator: torch.Generator) -> None:
    """Draw weights with which codes depend on the sound, and the sound on the codes."""
    fill_mimi_encoder(codec, generator)
    for param in codec.decoder.parameters():
        if param.dim() > 1:
            param.mul_(3.0)
    codes = torch.randint(CODEBOOK, (1, CODEBOOKS, 32), generator=generator)
    last = codec.decoder.layers[-1].conv
    set_level(last, lambda: codec.decode(codes).audio_values, rms=0.15)


def _tokenizer() -> Qwen2Tokenizer:
    tokenizer = make_tokenizer((BEGIN, END, AUDIO, AUDIO_END), NAMED_TOKENS, CHAT_TEMPLATE)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BEGIN, END, AUDIO
    return tokenizer
