# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen2.5-Omni (reference: transformers ``Qwen2_5OmniForConditionalGeneration``).

The codec side keeps the real ids (vocabulary 8448, 8193 embeddings) and the real rates (50 codes
and 100 mel frames a second, 240 samples a mel frame, blocks of 24 mel frames); sizes and depths are
reduced.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
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
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if loop.first and message.role != 'system' -%}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}
            {%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part -%}
                {{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
            {%- elif part.type == 'video' or 'video' in part or 'video_url' in part -%}
                {{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Chosen so that seed 0 has what tests/testing asserts: replies and speech that end by themselves
# on some prompts, safe argmax margins, no one-token replies.
BASE_SEED = 1
TEXT_VOCAB = 512
HEAD_DIM = 32
# As in the real checkpoint, the speech ids of the text vocabulary have no tokenizer entry.
TTS_PAD, TTS_START, TTS_END = 495, 496, 497
SPEAKER_BOS = {"Ethan": 506, "Chelsie": 508}
CODES = 8192
CODEC_VOCAB = 8448
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = 8292, 8293, 8294, 8296
MEL_DIM = 80
MEL_LEVEL = -4.0
REFERENCE_MEL_FRAMES = 60


def config(token_id: dict[str, int]) -> Qwen2_5OmniConfig:
    """The configuration; ``token_id`` maps special tokens and role names to ids."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]}
    media_ids = {
        "audio_token_index": token_id["<|AUDIO|>"],
        "image_token_index": token_id["<|IMAGE|>"],
        "video_token_index": token_id["<|VIDEO|>"],
        "audio_start_token_id": token_id["<|audio_bos|>"],
        "audio_end_token_id": token_id["<|audio_eos|>"],
        "vision_start_token_id": token_id["<|vision_bos|>"],
        "vision_end_token_id": token_id["<|vision_eos|>"],
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    audio = dict(
        num_mel_bins=128,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        d_model=64,
        output_dim=128,
        n_window=100,
        max_source_positions=1500,
    )
    vision = dict(
        depth=4,
        hidden_size=64,
        intermediate_size=96,
        num_heads=2,
        patch_size=14,
        spatial_merge_size=2,
        spatial_patch_size=14,
        temporal_patch_size=2,
        out_hidden_size=128,
        fullatt_block_indexes=[1, 3],
        window_size=56,
        tokens_per_second=25,
    )
    thinker = dict(
        audio_config=audio,
        vision_config=vision,
        text_config=dict(
            vocab_size=TEXT_VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            rope_parameters=rope,
            tie_word_embeddings=False,
        ),
        user_token_id=token_id["user"],
        bos_token_id=token_id[IM_START],
        eos_token_id=token_id[IM_END],
        pad_token_id=token_id[END_OF_TEXT],
        **media_ids,
    )
    talker = dict(
        vocab_size=CODEC_VOCAB,
        embedding_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=32768,
        rope_parameters=rope,
        tts_codec_pad_token_id=CODEC_PAD,
        tts_codec_start_token_id=CODEC_BOS,
        tts_codec_end_token_id=CODEC_EOS,
        tts_codec_mask_token_id=CODEC_MASK,
        tts_text_pad_token_id=TTS_PAD,
        tts_text_start_token_id=TTS_START,
        tts_text_end_token_id=TTS_END,
        spatial_merge_size=2,
        **media_ids,
    )
    dit = dict(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=16,
        emb_dim=16,
        num_embeds=CODES + 1,
        mel_dim=MEL_DIM,
        block_size=24,
        look_ahead_layers=[1],
        look_backward_layers=[0, 2],
        repeats=2,
        enc_emb_dim=16,
        enc_dim=16,
        enc_channels=[16, 16, 16, 16, 48],
        enc_attention_channels=8,
        enc_se_channels=8,
    )
    bigvgan = dict(
        mel_dim=MEL_DIM,
        upsample_initial_channel=64,
        upsample_rates=[5, 3, 2, 2, 2, 2],
        upsample_kernel_sizes=[11, 7, 4, 4, 4, 4],
    )
    return Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config=talker,
        token2wav_config=dict(dit_config=dit, bigvgan_config=bigvgan),
        dtype="float32",
    )


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into ``out``."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS, NAMED_TOKENS, CHAT_TEMPLATE)
    token_id: dict[str, Any] = tokenizer.get_vocab()
    model = Qwen2_5OmniForConditionalGeneration(config(token_id))
    fill(model, seed, stop=token_id[IM_END], spoken=whole_text_ids(tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=token_id[IM_END], pad_token_id=token_id[END_OF_TEXT]
    )
    model.save_pretrained(out)
    torch.save(speakers(seed), out / "spk_dict.pt")
    tokenizer.save_pretrained(out)
    write_processor(
        out,
        "Qwen2_5OmniProcessor",
        14,
        mean=[0.48145466, 0.4578275, 0.40821073],
        std=[0.26862954, 0.26130258, 0.27577711],
    )


def fill(
    model: Qwen2_5OmniForConditionalGeneration, seed: int, stop: int, spoken: set[int]
) -> None:
    """Draw the weights; ``stop`` is the thinker's end token, ``spoken`` the text it may say.

    Codes that the token-to-wave stage has no embedding for are never the talker's argmax.
    """
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    randomize(model, generator)
    shape_logits(
        model.thinker.lm_head,
        spread=3.0,
        stop={stop: 1.7},
        silent=set(range(TEXT_VOCAB)) - spoken - {stop},
    )
    shape_logits(
        model.talker.codec_head,
        spread=3.0,
        stop={CODEC_EOS: 2.3},
        silent=set(range(CODES, CODEC_VOCAB)) - {CODEC_EOS},
    )
    with torch.no_grad():
        model.token2wav.code2wav_dit_model.proj_out.bias.add_(MEL_LEVEL)
    mel = MEL_LEVEL + 2 * torch.randn(1, MEL_DIM, 48, generator=generator)
    vocoder = model.token2wav.code2wav_bigvgan_model
    set_level(vocoder.conv_post, lambda: vocoder(mel), rms=0.15)


def speakers(seed: int) -> dict[str, dict[str, Any]]:
    """The voices: ``cond`` float32 ``[1, 16]``, ``ref_mel`` float32 ``[1, frames, 80]`` (log)."""
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: {
            "cond": torch.randn(1, 16, generator=generator),
            "ref_mel": torch.randn(1, REFERENCE_MEL_FRAMES, MEL_DIM, generator=generator)
            + MEL_LEVEL,
            "bos_token": bos_token,
        }
        for name, bos_token in SPEAKER_BOS.items()
    }
