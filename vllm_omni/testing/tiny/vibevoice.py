# SPDX-License-Identifier: Apache-2.0
"""Tiny VibeVoice (reference: transformers' `VibeVoiceForConditionalGeneration`).

The codec keeps its real frame (3200 samples) and the diffusion head its real solver; sizes and
depths are reduced. Speech ends by itself, and so do stretches of sound within it, after which a new
one begins, as in a trained model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    VibeVoiceAcousticTokenizerFeatureExtractor,
    VibeVoiceConfig,
    VibeVoiceForConditionalGeneration,
    VibeVoiceProcessor,
)

from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, make_tokenizer
from vllm_omni.testing.tiny.weights import randomize, set_level

SOUND_BEGINS, SOUND_ENDS, SOUND = "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"
# What a conversation with recordings looks like; of speakers in the order of their numbers.
CHAT_TEMPLATE = """\
{{- ' Transform the text provided by various speakers into speech output, utilizing the distinct \
voice of each respective speaker.\\n' -}}
{%- set heard = namespace(any=false) -%}
{%- for message in messages -%}
    {%- for part in message.content -%}
        {%- if part.type == 'audio' -%}
            {{- '' if heard.any else ' Voice input:\\n' -}}
            {%- set heard.any = true -%}
            {{- ' Speaker ' + message.role + ':<|vision_start|><|vision_pad|><|vision_end|>\\n' -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{{- ' Text input:\\n' -}}
{%- for message in messages -%}
    {%- for part in message.content -%}
        {%- if part.type == 'text' -%}
            {{- ' Speaker ' + message.role + ': ' + part.text + '\\n' -}}
        {%- endif -%}
    {%- endfor -%}
{%- endfor -%}
{{- ' Speech output:\\n<|vision_start|>' -}}
"""

# Chosen so that seed 0 has what the tests assert.
BASE_SEED = 1
WIDTH = 64
LATENTS = 16
SPREAD = 1.0
"""Of the logits."""
STEADY = 2.0
"""How strongly sound goes on."""
MARK = 8.0
"""How much a token stands out that decides what may follow."""


def config(ids: dict[str, int]) -> dict[str, Any]:
    """`config.json`; `ids` are those of special tokens."""
    codec = {
        "depths": [1, 1, 1, 1, 1, 1, 1],
        "downsampling_ratios": [2, 2, 4, 5, 5, 8],
        "num_filters": 2,
    }
    return {
        "architectures": ["VibeVoiceForConditionalGeneration"],
        "audio_bos_token_id": ids[SOUND_BEGINS],
        "audio_config": {
            **codec,
            "hidden_size": LATENTS,
            "model_type": "vibevoice_acoustic_tokenizer",
            "vae_std": 0.625,
        },
        "audio_eos_token_id": ids[SOUND_ENDS],
        "audio_token_id": ids[SOUND],
        "diffusion_head_config": {
            "frequency_embedding_size": 32,
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "latent_size": LATENTS,
            "num_hidden_layers": 2,
        },
        "dtype": "float32",
        "eos_token_id": ids[END_OF_TEXT],
        "model_type": "vibevoice",
        "pad_token_id": ids[END_OF_TEXT],
        "semantic_model_config": {
            **codec,
            "hidden_size": 8,
            "model_type": "vibevoice_acoustic_tokenizer_encoder",
        },
        "text_config": {
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "max_position_embeddings": 32768,
            "model_type": "qwen2",
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "vocab_size": len(ids),
        },
    }


GENERATION_CONFIG = {
    "do_sample": False,
    "guidance_scale": 1.3,
    "max_new_tokens": 100,
    "noise_scheduler_class": "DPMSolverMultistepScheduler",
    "noise_scheduler_config": {
        "beta_schedule": "squaredcos_cap_v2",
        "prediction_type": "v_prediction",
    },
    "num_diffusion_steps": 6,
}


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    special = (END_OF_TEXT, SOUND_BEGINS, SOUND_ENDS, SOUND)
    tokenizer = make_tokenizer(special, {}, CHAT_TEMPLATE)
    tokenizer.eos_token = END_OF_TEXT
    whole = config(tokenizer.get_vocab())
    model = make_model(VibeVoiceConfig(**whole), torch.Generator().manual_seed(BASE_SEED + seed))
    model.save_pretrained(out)
    extractor = VibeVoiceAcousticTokenizerFeatureExtractor()
    VibeVoiceProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    ends = {"eos_token_id": whole["eos_token_id"], "pad_token_id": whole["pad_token_id"]}
    generation = json.dumps({**GENERATION_CONFIG, **ends}, indent=2)
    (out / "generation_config.json").write_text(f"{generation}\n")


@torch.no_grad()
def make_model(
    config: VibeVoiceConfig, generator: torch.Generator
) -> VibeVoiceForConditionalGeneration:
    """The model with weights."""
    model = VibeVoiceForConditionalGeneration(config).eval()
    randomize(model, generator)
    model.model.latent_scaling_factor.fill_(0.8)
    model.model.latent_bias_factor.fill_(-0.05)
    _let_sound_go_on(model)
    tower = model.model.audio_tower
    latents = torch.randn(1, LATENTS, 24, generator=generator)
    set_level(tower.decoder.head.conv, lambda: tower.decoder(latents).audio, rms=0.15)
    return model


def _let_sound_go_on(model: VibeVoiceForConditionalGeneration) -> None:
    """Two coordinates of what is fed are not random: one is always there, and speaks for sound; the
    other marks the end of a stretch, after which no sound follows."""
    config, core = model.config, model.model
    embeddings = core.language_model.embed_tokens.weight
    embeddings[:, 0], embeddings[:, 1] = MARK, 0.0
    embeddings[config.audio_eos_token_id, 1] = 3 * MARK
    for connector, share in ((core.multi_modal_projector, 1.0), (core.semantic_connector, 0.0)):
        connector.linear_2.weight[:2] = 0.0
        connector.linear_2.bias[:2] = torch.tensor([share * MARK, 0.0])
    model.lm_head.weight.mul_(SPREAD)
    model.lm_head.weight[:, :2] = 0.0
    model.lm_head.weight[config.audio_token_id, :2] = torch.tensor([STEADY, -3.0])
    model.lm_head.weight[config.audio_bos_token_id, :2] = torch.tensor([-0.5, 2.0])
    model.lm_head.weight[[config.audio_eos_token_id, config.eos_token_id], 0] = 0.3
