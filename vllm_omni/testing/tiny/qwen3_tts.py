# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3-TTS (reference: the authors' package `qwen-tts` 0.1.1), with the 12.5 Hz codec.

The codec side keeps the real ids (vocabulary 3072, codebook 2048, specials, languages and voices in
the last 1024) and the real frame rate (1920 samples a frame); sizes and depths are reduced. The
variants differ as the published ones do: `base` has a speaker encoder and no voices, and is the
smaller size, whose code predictor is as wide as the talker.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig, Qwen3TTSTalkerConfig
from vllm_omni.config.hf.qwen3_tts_codec import Qwen3TTSCodecConfig
from vllm_omni.models.qwen3_tts_codec import Codebook, Codec
from vllm_omni.models.qwen3_tts_speaker import SpeakerEncoder
from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.mimi import fill_mimi_encoder
from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, make_tokenizer
from vllm_omni.testing.tiny.weights import randomize, set_level, shape_logits

SPECIAL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
NAMED_TOKENS = {
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on most texts.
BASE_SEED = 11
TEXT_VOCAB = 512
HEAD_DIM = 32
CODE_GROUPS = 4
CODEBOOK = 2048
CODEC_VOCAB = 3072
END_OF_SPEECH = 2150
CODEC_IDS = {
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": END_OF_SPEECH,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
}
LANGUAGES = {"chinese": 2055, "english": 2050, "german": 2053, "japanese": 2058}
DIALECTS = {"sichuan_dialect": 2062}
VOICES = {"serena": 3066, "vivian": 3065, "eric": 2875}
SPEAKS = {"serena": False, "vivian": False, "eric": "sichuan_dialect"}
STOP = {"base": 3.6, "custom_voice": 2.4, "voice_design": 2.4}
"""Factor on the logit of the end of speech."""
SAMPLE_RATE = 24_000


def talker_config(variant: str) -> dict[str, Any]:
    """`talker_config` as the hub has it; see `write` for the variants."""
    with_voices = variant == "custom_voice"
    attention = {
        "attention_bias": False,
        "attention_dropout": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    predictor = {
        **attention,
        "hidden_size": 64 if variant == "base" else 48,
        "intermediate_size": 96,
        "layer_types": ["full_attention"] * 2,
        "model_type": "qwen3_tts_talker_code_predictor",
        "num_attention_heads": 2,
        "num_code_groups": CODE_GROUPS,
        "rope_scaling": None,
        "vocab_size": CODEBOOK,
    }
    return {
        **attention,
        **CODEC_IDS,
        "code_predictor_config": predictor,
        "codec_language_id": LANGUAGES | (DIALECTS if with_voices else {}),
        "hidden_size": 64,
        "intermediate_size": 128,
        "model_type": "qwen3_tts_talker",
        "num_attention_heads": 4,
        "num_code_groups": CODE_GROUPS,
        "position_id_per_seconds": 13,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": [6, 5, 5],
            "rope_type": "default",
            "type": "default",
        },
        "spk_id": VOICES if with_voices else {},
        "spk_is_dialect": SPEAKS if with_voices else {},
        "text_hidden_size": 96,
        "text_vocab_size": TEXT_VOCAB,
        "vocab_size": CODEC_VOCAB,
    }


def config(variant: str, token_id: dict[str, int]) -> dict[str, Any]:
    """`config.json` as the hub has it; `token_id` maps special tokens and role names to ids."""
    speaker = {
        "enc_attention_channels": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_dim": 64,
        "enc_se_channels": 8,
        "sample_rate": SAMPLE_RATE,
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "assistant_token_id": token_id["assistant"],
        "dtype": "float32",
        "im_end_token_id": token_id[IM_END],
        "im_start_token_id": token_id[IM_START],
        "model_type": "qwen3_tts",
        "speaker_encoder_config": speaker if variant == "base" else {},
        "talker_config": talker_config(variant),
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_bos_token_id": token_id["<tts_text_bos>"],
        "tts_eos_token_id": token_id["<tts_text_eod>"],
        "tts_model_size": "0b6" if variant == "base" else "1b7",
        "tts_model_type": variant,
        "tts_pad_token_id": token_id["<tts_pad>"],
    }


def codec_config() -> dict[str, Any]:
    """`speech_tokenizer/config.json` as the hub has it."""
    encoder = {
        "codebook_dim": 16,
        "codebook_size": CODEBOOK,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_filters": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_quantizers": CODE_GROUPS + 2,
        "rope_theta": 10_000,
        "sliding_window": 250,
        "upsample_groups": 32,
        "vector_quantization_hidden_dimension": 16,
    }
    decoder = {
        "codebook_dim": 32,
        "codebook_size": CODEBOOK,
        "decoder_dim": 32,
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "latent_dim": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_quantizers": CODE_GROUPS,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000,
        "sliding_window": 6,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "decode_upsample_rate": 1920,
        "decoder_config": decoder,
        "encode_downsample_rate": 1920,
        "encoder_config": encoder,
        "encoder_valid_num_quantizers": CODE_GROUPS,
        "input_sample_rate": SAMPLE_RATE,
        "model_type": "qwen3_tts_tokenizer_12hz",
        "output_sample_rate": SAMPLE_RATE,
    }


GENERATION_CONFIG = {
    "do_sample": True,
    "max_new_tokens": 8192,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
}
CODEC_PREPROCESSOR = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": SAMPLE_RATE,
}


def write(out: Path, seed: int, variant: str) -> None:
    """Write the whole checkpoint into `out`; `variant` is base, custom_voice or voice_design."""
    write_of_sizes(out, seed, lambda ids: config(variant, ids), codec_config(), STOP[variant])


def write_of_sizes(
    out: Path,
    seed: int,
    config_of: Callable[[dict[str, int]], dict[str, Any]],
    codec_sizes: dict[str, Any],
    stop: float | None,
) -> None:
    """Write a checkpoint of other sizes.

    Args:
        out: An empty folder.
        seed: Of the weights.
        config_of: Makes `config.json` out of the tokenizer's vocabulary.
        codec_sizes: `speech_tokenizer/config.json`.
        stop: Factor on the logit of the end of speech; 0 for speech that never ends greedily. None
            for no weights but the codec's (`load_format: dummy` makes the others).
    """
    tokenizer = make_tokenizer(SPECIAL_TOKENS, NAMED_TOKENS, CHAT_TEMPLATE)
    whole = config_of(tokenizer.get_vocab())
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    codec = out / "speech_tokenizer"
    codec.mkdir()
    _save_tokenizer(tokenizer, out)
    _write_json(out / "config.json", whole)
    _write_json(out / "generation_config.json", GENERATION_CONFIG)
    _write_json(codec / "config.json", codec_sizes)
    _write_json(codec / "preprocessor_config.json", CODEC_PREPROCESSOR)
    sizes = Qwen3TTSCodecConfig(**codec_sizes)
    _save(make_codec(sizes, generator), codec / "model.safetensors")
    if stop is not None:
        _save(make_model(Qwen3TTSConfig(**whole), generator, stop), out / "model.safetensors")


def make_model(config: Qwen3TTSConfig, generator: torch.Generator, stop: float) -> nn.Module:
    """The talker and, of a base model, the speaker encoder, with weights."""
    model = nn.Module()
    model.talker = Talker(config.talker_config)
    randomize(model, generator)
    shape_logits(model.talker.codec_head, spread=3.0, stop={END_OF_SPEECH: stop})
    for head in model.talker.code_predictor.lm_head:
        shape_logits(head, spread=4.0, stop={})
    if config.tts_model_type == "base":
        model.speaker_encoder = SpeakerEncoder(config.speaker_encoder_config)
        fill_speaker_encoder(model.speaker_encoder, generator)
    return model


class Talker(nn.Module):
    """Nothing but the parameters, by their published names."""

    def __init__(self, config: Qwen3TTSTalkerConfig) -> None:
        super().__init__()
        predictor = config.code_predictor_config
        width, narrow = config.hidden_size, predictor.hidden_size
        groups = range(config.num_code_groups - 1)
        self.model = backbone(config)
        self.model.codec_embedding = nn.Embedding(config.vocab_size, width)
        self.model.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        self.text_projection = nn.Module()
        self.text_projection.linear_fc1 = nn.Linear(
            config.text_hidden_size, config.text_hidden_size
        )
        self.text_projection.linear_fc2 = nn.Linear(config.text_hidden_size, width)
        self.codec_head = nn.Linear(width, config.vocab_size, bias=False)
        self.code_predictor = nn.Module()
        self.code_predictor.model = backbone(predictor)
        self.code_predictor.model.codec_embedding = nn.ModuleList(
            [nn.Embedding(predictor.vocab_size, width) for _ in groups]
        )
        self.code_predictor.lm_head = nn.ModuleList(
            [nn.Linear(narrow, predictor.vocab_size, bias=False) for _ in groups]
        )
        if narrow != width:
            self.code_predictor.small_to_mtp_projection = nn.Linear(width, narrow)


def backbone(config: Any) -> nn.Module:
    """The layers and the final norm of a Qwen3 decoder."""
    model = Qwen3Model(
        Qwen3Config(
            vocab_size=1,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
    )
    del model.embed_tokens
    return model


@torch.no_grad()
def fill_speaker_encoder(encoder: SpeakerEncoder, generator: torch.Generator) -> None:
    """Draw weights with which recordings give embeddings as far apart as those of codes are."""
    randomize(encoder, generator)
    for name, param in encoder.named_parameters():
        if param.dim() > 1 and not name.startswith("fc."):
            param.mul_(3.0)
    heard = torch.stack([torch.from_numpy(sound(1.0, SAMPLE_RATE, seed)) for seed in range(8)])
    embeddings = encoder.embed(heard)
    level = embeddings.std(dim=0).mean()
    encoder.fc.bias.sub_(embeddings.mean(dim=0))
    for param in encoder.fc.parameters():
        param.div_(level)


@torch.no_grad()
def make_codec(config: Qwen3TTSCodecConfig, generator: torch.Generator) -> Codec:
    """The codec with weights: codes depend on the sound, and the sound on the codes."""
    codec = Codec(config).eval()
    randomize(codec, generator)
    for module in codec.modules():
        if isinstance(module, Codebook):
            usage = 0.5 + torch.rand(module.cluster_usage.shape, generator=generator)
            table = torch.randn(module.embedding_sum.shape, generator=generator)
            module.cluster_usage.copy_(usage)
            module.embedding_sum.copy_(table * usage[:, None])
    fill_mimi_encoder(codec.encoder, generator)
    groups = config.decoder_config.num_quantizers
    codes = torch.randint(CODEBOOK, (1, groups, 32), generator=generator)
    set_level(codec.decoder.decoder[-1].conv, lambda: codec.decoder(codes), rms=0.15)
    return codec


def _save_tokenizer(tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Write its files such that older transformers, which the reference needs, read them too."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["extra_special_tokens"]
    _write_json(path, settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _save(module: nn.Module, path: Path) -> None:
    tensors = {name: each.contiguous() for name, each in module.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
