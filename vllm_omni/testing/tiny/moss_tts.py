# SPDX-License-Identifier: Apache-2.0
"""Tiny MOSS-TTS, named and laid out as `OpenMOSS-Team/MOSS-TTS` and its codec's repository.

The codes keep their real ids (1024 of them, padding after these), and frames their real length
(1920 samples); sizes, depths, the codec's window and the number of codebooks are reduced, of which
the codec has more than the model uses, as MOSS-TTS's relatives have it. The codec is a folder of
the checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from vllm_omni.config.hf.moss_tts import MossAudioTokenizerConfig
from vllm_omni.models.moss_codec import MossDecoder, MossEncoder
from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.tokenizer import END_OF_TEXT, IM_END, IM_START, make_tokenizer
from vllm_omni.testing.tiny.weights import randomize, save_tensors, write_json

SPECIAL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_user_slot|>",
    "<|audio_assistant_gen_slot|>",
    "<|audio_assistant_delay_slot|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# Chosen so that seed 0 has what the tests assert: sounds that end by themselves on some texts.
BASE_SEED = 6
GROUPS, CODEC_GROUPS = 4, 5
CODES = 1024
WIDTH = 64
BEGIN, STAY, LEAVE = 0.5, 0.36, 1.4
"""How much the model wants to begin a sound, to go on with it, and to end it."""
SURE = 4.0
"""Factor on the logits of text tokens: sampling them seldom leaves what is likely."""
SAMPLE_RATE = 24_000
CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer"
PATCHES = (240, 2, 2, 2)
WINDOW_SECONDS = 0.4
CODEC_WIDTH, INNER, FRAME_WIDTH = 32, 16, 24


def config(token_id: dict[str, int]) -> dict[str, Any]:
    """`config.json`; `token_id` maps special tokens to ids."""
    return {
        "architectures": ["MossTTSDelayModel"],
        "audio_assistant_delay_slot_token_id": token_id["<|audio_assistant_delay_slot|>"],
        "audio_assistant_gen_slot_token_id": token_id["<|audio_assistant_gen_slot|>"],
        "audio_end_token_id": token_id["<|audio_end|>"],
        "audio_pad_code": CODES,
        "audio_start_token_id": token_id["<|audio_start|>"],
        "audio_user_slot_token_id": token_id["<|audio_user_slot|>"],
        "audio_vocab_size": CODES,
        "dtype": "float32",
        "im_end_token_id": token_id[IM_END],
        "im_start_token_id": token_id[IM_START],
        "language_config": {
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
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "vocab_size": len(token_id),
        },
        "model_type": "moss_tts_delay",
        "n_vq": GROUPS,
        "pad_token_id": token_id[END_OF_TEXT],
        "sampling_rate": SAMPLE_RATE,
    }


def _transformer(inputs: int, outputs: int) -> dict[str, Any]:
    return {
        "causal": True,
        "conv_layout": True,
        "d_model": CODEC_WIDTH,
        "dim_feedforward": 64,
        "gating": "none",
        "input_dimension": inputs,
        "layer_scale": 0.01,
        "max_period": 10000,
        "module_type": "Transformer",
        "norm": "layer_norm",
        "num_heads": 2,
        "num_layers": 2,
        "output_dimension": outputs,
        "positional_embedding": "rope",
    }


def codec_config() -> dict[str, Any]:
    """`audio_tokenizer/config.json`; the decoder mirrors the encoder."""
    widths = (1, INNER, INNER, INNER, FRAME_WIDTH)
    encoder: list[dict[str, Any]] = []
    decoder: list[dict[str, Any]] = []
    for patch, fine, coarse in zip(PATCHES, widths, widths[1:], strict=False):
        patching = {"module_type": "PatchedPretransform", "patch_size": patch}
        encoder += [patching, _transformer(patch * fine, coarse)]
        decoder = [_transformer(coarse, patch * fine), patching, *decoder]
    return {
        "architectures": ["MossAudioTokenizerModel"],
        "causal_transformer_context_duration": WINDOW_SECONDS,
        "decoder_kwargs": decoder,
        "downsample_rate": 1920,
        "encoder_kwargs": encoder,
        "model_type": "moss-audio-tokenizer",
        "quantizer_kwargs": {
            "codebook_dim": 8,
            "codebook_size": CODES,
            "input_dim": FRAME_WIDTH,
            "num_quantizers": CODEC_GROUPS,
            "output_dim": FRAME_WIDTH,
            "quantizer_type": "rlfq",
            "rvq_dim": 16,
        },
        "quantizer_type": "rlfq",
        "sampling_rate": SAMPLE_RATE,
    }


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    tokenizer = make_tokenizer(SPECIAL_TOKENS, {}, CHAT_TEMPLATE)
    tokenizer.save_pretrained(out)
    whole = config(tokenizer.get_vocab())
    write_json(out / "config.json", whole)
    write_json(out / "processor_config.json", {"audio_tokenizer_name_or_path": CODEC})
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    save_tensors(make_model(whole, some_turn(tokenizer), generator), out / "model.safetensors")
    codec = out / "audio_tokenizer"
    codec.mkdir()
    write_json(codec / "config.json", codec_config())
    generator.manual_seed(BASE_SEED + seed)
    save_tensors(make_codec(generator), codec / "model.safetensors")


def some_turn(tokenizer: Qwen2Tokenizer) -> list[int]:
    """Text tokens of what a model is asked."""
    message = [{"role": "user", "content": "- Text:\nOne, two, three.\n</user_inst>"}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def make_model(
    whole: dict[str, Any], turn: list[int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The codec language model's weights.

    Args:
        whole: Its config.
        turn: Text tokens of a prompt.
        generator: Draws them.
    """
    backbone = Qwen3Model(Qwen3Config(**whole["language_config"]))
    randomize(backbone, generator)

    def drawn(rows: int, std: float) -> torch.Tensor:
        return torch.randn(rows, WIDTH, generator=generator) * std

    # A row is the sum of a text token's embedding and those of its codes; what is no code is small.
    tables = [drawn(CODES + 1, 1.0) for _ in range(GROUPS)]
    for table in tables:
        table[CODES] *= 0.2
    text = drawn(whole["language_config"]["vocab_size"], WIDTH**-0.5)
    slot = whole["audio_assistant_gen_slot_token_id"]
    ids = torch.tensor([*turn, whole["audio_start_token_id"], *[slot] * 200])
    rows = torch.randint(CODES, (len(ids), GROUPS), generator=generator)
    rows[:-200] = CODES
    inputs = backbone.embed_tokens(ids) + sum(tables[g][rows[:, g]] for g in range(GROUPS))
    hidden = backbone.eval()(inputs_embeds=inputs[None]).last_hidden_state[0]
    asked, sounding = hidden[len(turn) - 1], hidden[-200:].mean(dim=0)
    text[whole["audio_start_token_id"]] = BEGIN * functional.normalize(asked, dim=0)
    text[slot] = STAY * functional.normalize(sounding, dim=0)
    text[whole["audio_assistant_delay_slot_token_id"]] *= LEAVE
    tensors = {"lm_heads.0.weight": text * SURE}
    for group in range(GROUPS):
        tensors[f"emb_ext.{group}.weight"] = tables[group]
        tensors[f"lm_heads.{group + 1}.weight"] = drawn(CODES + 1, 3 * WIDTH**-0.5)
    for name, tensor in backbone.state_dict().items():
        tensors[f"language_model.{name}"] = tensor
    return tensors


@torch.no_grad()
def make_codec(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The codec's weights: codes depend on the sound, and the sound on the codes."""
    settings = MossAudioTokenizerConfig(**codec_config())
    encoder, decoder = MossEncoder(settings).eval(), MossDecoder(settings).eval()
    for module in (encoder, decoder):
        randomize(module, generator)
    decoder.quantizer.load_state_dict(encoder.quantizer.state_dict())
    heard = torch.from_numpy(sound(2.0, SAMPLE_RATE, seed=3))[None, : 1920 * 24]
    level = decoder.decode(encoder(heard, GROUPS).transpose(1, 2)).square().mean().sqrt()
    decoder.decoder.transformers[-1].output_proj.weight.mul_(0.15 / level)
    return {**encoder.state_dict(), **decoder.state_dict()}
