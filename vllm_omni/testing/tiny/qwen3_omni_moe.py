# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3-Omni-MoE (reference: transformers ``Qwen3OmniMoeForConditionalGeneration``).

The codec side keeps the real ids (vocabulary 3072, codebook 2048, specials in the last 1024) and
the real frame rate (1920 samples a frame, 12.5 frames a second); sizes and depths are reduced.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

from vllm_omni.testing.tiny.processor import write_processor
from vllm_omni.testing.tiny.tokenizer import (
    END_OF_TEXT,
    IM_END,
    IM_START,
    make_tokenizer,
    whole_text_ids,
)
from vllm_omni.testing.tiny.weights import randomize, set_level, shape_logits

SPECIAL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part or 'video_url' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}
        {{- render(messages[0].content) + '\\n\\n' -}}
    {%- endif -%}
    {{- '# Tools\\n<tools>' -}}
    {%- for tool in tools -%}
        {{- '\\n' + (tool | tojson) -}}
    {%- endfor -%}
    {{- '\\n</tools>\\nAnswer a call in <tool_call></tool_call>.<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + render(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + render(message.content) -}}
        {{- '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif not (message.role == 'system' and loop.first) -%}
        {{- '<|im_start|>' + message.role + '\\n' -}}
        {%- if message.content -%}
            {{- render(message.content) -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- set arguments = call.arguments -%}
            {%- if arguments is not string -%}
                {%- set arguments = arguments | tojson -%}
            {%- endif -%}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
            {{- arguments + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Chosen so that seed 0 has what tests/testing asserts: replies and speech that end by themselves
# on some prompts, safe argmax margins, no one-token replies.
BASE_SEED = 7
TEXT_VOCAB = 512
HEAD_DIM = 32
CODE_GROUPS = 4
CODEBOOK = 2048
CODEC_VOCAB = 3072
CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}
SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}


def config(token_id: dict[str, int]) -> Qwen3OmniMoeConfig:
    """The configuration; ``token_id`` maps special tokens and role names to ids."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1_000_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
        "interleaved": True,
    }
    media_ids = {
        "audio_token_id": token_id["<|audio_pad|>"],
        "image_token_id": token_id["<|image_pad|>"],
        "video_token_id": token_id["<|video_pad|>"],
        "audio_start_token_id": token_id["<|audio_start|>"],
        "vision_start_token_id": token_id["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }
    attention = dict(num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=32768)
    audio = dict(
        num_mel_bins=128,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        d_model=64,
        output_dim=128,
        downsample_hidden_size=16,
        n_window=50,
        n_window_infer=800,
        conv_chunksize=500,
        max_source_positions=1500,
    )
    vision = dict(
        depth=3,
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=128,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
        image_size=128,
        apply_vit_abs_pos_embed=True,
        tokens_per_second=2,
    )
    thinker = dict(
        audio_config=audio,
        vision_config=vision,
        text_config=dict(
            attention,
            vocab_size=TEXT_VOCAB,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            rope_parameters=rope,
            tie_word_embeddings=False,
        ),
        audio_end_token_id=token_id["<|audio_end|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        user_token_id=token_id["user"],
        **media_ids,
    )
    talker = dict(
        text_config=dict(
            attention,
            vocab_size=CODEC_VOCAB,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            rope_parameters=rope,
            tie_word_embeddings=False,
        ),
        code_predictor_config=dict(
            attention,
            vocab_size=CODEBOOK,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_code_groups=CODE_GROUPS,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
        num_code_groups=CODE_GROUPS,
        thinker_hidden_size=128,
        accept_hidden_layer=3,
        spatial_merge_size=2,
        speaker_id=dict(SPEAKERS),
        vision_end_token_id=token_id["<|vision_end|>"],
        **CODEC_IDS,
        **media_ids,
    )
    code2wav = dict(
        codebook_size=CODEBOOK,
        num_quantizers=CODE_GROUPS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=6,
        upsample_rates=[8, 5, 4, 3],
        upsampling_ratios=[2, 2],
        decoder_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        im_start_token_id=token_id[IM_START],
        im_end_token_id=token_id[IM_END],
        tts_pad_token_id=token_id["<tts_pad>"],
        tts_bos_token_id=token_id["<tts_text_bos>"],
        tts_eos_token_id=token_id["<tts_text_eod>"],
        system_token_id=token_id["system"],
        user_token_id=token_id["user"],
        assistant_token_id=token_id["assistant"],
        dtype="float32",
    )


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into ``out``."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS, NAMED_TOKENS, CHAT_TEMPLATE)
    token_id: dict[str, Any] = tokenizer.get_vocab()
    model = Qwen3OmniMoeForConditionalGeneration(config(token_id))
    fill(model, seed, stop=token_id[IM_END], spoken=whole_text_ids(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=token_id[IM_END], pad_token_id=token_id[END_OF_TEXT]
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_processor(out, "Qwen3OmniMoeProcessor", 16, mean=[0.5] * 3, std=[0.5] * 3)


def fill(
    model: Qwen3OmniMoeForConditionalGeneration, seed: int, stop: int, spoken: set[int]
) -> None:
    """Draw the weights; ``stop`` is the thinker's end token, ``spoken`` the text it may say."""
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    randomize(model, generator)
    shape_logits(
        model.thinker.lm_head,
        spread=3.0,
        stop={stop: 2.0},
        silent=set(range(TEXT_VOCAB)) - spoken - {stop},
    )
    shape_logits(model.talker.codec_head, spread=3.0, stop={CODEC_IDS["codec_eos_token_id"]: 2.0})
    for head in model.talker.code_predictor.lm_head:
        shape_logits(head, spread=4.0, stop={})
    codes = torch.randint(CODEBOOK, (1, CODE_GROUPS, 32), generator=generator)
    set_level(model.code2wav.decoder[-1].conv, lambda: model.code2wav(codes), rms=0.15)
