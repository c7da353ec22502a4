# SPDX-License-Identifier: Apache-2.0
"""Tiny Voxtral TTS in Mistral's layout: `params.json`, `tekken.json`, `consolidated.safetensors`
and `voice_embedding/`.

Special tokens and codes keep their real ids, acoustic codes their 21 levels, the codec its strides,
kernels and attention windows; sizes, depths and the number of codes are reduced. Unlike published
checkpoints it has the codec's encoder, unless it is the variant `voices_only`.
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from mistral_common.tokens.tokenizers.base import SpecialTokens
from safetensors.torch import save_file
from torch import nn

from vllm_omni.config.hf.voxtral_tts import (
    END,
    SPECIAL_CODES,
    VoxtralAcousticConfig,
    VoxtralCodecConfig,
    padded,
)
from vllm_omni.models.voxtral_acoustic import AcousticTransformer
from vllm_omni.models.voxtral_codec import CodecDecoder, CodecEncoder
from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.weights import randomize, set_level, shape_logits

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on some texts.
BASE_SEED = 6
WIDTH, HEAD_DIM, HEADS, KV_HEADS, LAYERS, INNER = 64, 32, 4, 2, 2, 128
SEMANTIC, LEVELS, GROUPS = 96, 21, 6
VOICES = {"neutral_female": 7, "casual_male": 5}
"""Frames of each voice's recording."""
REAL_IDS = {"[AUDIO]": 24, "[BEGIN_AUDIO]": 25, "[NEXT_AUDIO_TEXT]": 35, "[REPEAT_AUDIO_TEXT]": 36}
SPECIAL_TOKENS = 40
VOCABULARY = SPECIAL_TOKENS + 256
STOP = 1.4
"""Factor on the logit of the end."""
SPEED = 0.5
"""Factor on the flow's velocity: few codes end at their least or largest level."""
SAMPLE_RATE = 24_000
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"


def acoustic_args() -> dict[str, Any]:
    """`acoustic_transformer_args`; the number of steps is left open, as in the published file."""
    return {
        "dim": WIDTH,
        "head_dim": 16,
        "hidden_dim": 96,
        "input_dim": WIDTH,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "rope_theta": 10000.0,
        "sigma": 1e-05,
        "sigma_max": 1.0,
        "use_biases": False,
    }


def codec_args() -> dict[str, Any]:
    """`audio_tokenizer_args`, but for the voices."""
    return {
        "acoustic_codebook_size": LEVELS,
        "acoustic_dim": GROUPS,
        "attn_sliding_window_size": 16,
        "causal": True,
        "channels": 1,
        "conv_weight_norm": True,
        "decoder_convs_kernels_str": "3,4,4,4",
        "decoder_convs_strides_str": "1,2,2,2",
        "decoder_transformer_lengths_str": "1,1,1,1",
        "dim": 32,
        "encoder_convs_kernels_str": "4,4,4,3",
        "encoder_convs_strides_str": "2,2,2,1",
        "encoder_transformer_lengths_str": "1,1,1,1",
        "half_attn_window_upon_downsampling": True,
        "head_dim": 16,
        "hidden_dim": 64,
        "layer_scale": True,
        "n_heads": 3,
        "n_kv_heads": 3,
        "norm_eps": 0.01,
        "patch_proj_kernel_size": 7,
        "pretransform_patch_size": 240,
        "qk_norm": True,
        "qk_norm_eps": 1e-06,
        "sampling_rate": SAMPLE_RATE,
        "semantic_codebook_size": SEMANTIC,
        "semantic_dim": 12,
        "use_biases": False,
    }


def params() -> dict[str, Any]:
    """`params.json`."""
    return {
        "causal": True,
        "dim": WIDTH,
        "head_dim": HEAD_DIM,
        "hidden_dim": INNER,
        "max_position_embeddings": 2048,
        "max_seq_len": 2048,
        "model_type": "voxtral_tts",
        "multimodal": {
            "audio_model_args": {
                "acoustic_codebook_size": LEVELS,
                "acoustic_transformer_args": acoustic_args(),
                "audio_encoding_args": {
                    "codebook_pattern": "parallel",
                    "frame_rate": 12.5,
                    "num_codebooks": 1 + GROUPS,
                    "sampling_rate": SAMPLE_RATE,
                },
                "audio_token_id": REAL_IDS["[AUDIO]"],
                "begin_audio_token_id": REAL_IDS["[BEGIN_AUDIO]"],
                "input_embedding_concat_type": "sum",
                "n_acoustic_codebook": GROUPS,
                "semantic_codebook_size": SEMANTIC,
            },
            "audio_tokenizer_args": {
                **codec_args(),
                "voice": {name: number for number, name in enumerate(VOICES)},
            },
            "bos_token_id": 1,
        },
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "n_layers": LAYERS,
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "tied_embeddings": True,
        "vocab_size": VOCABULARY,
    }


def write(out: Path, seed: int, variant: str = "") -> None:
    """Write the whole checkpoint into `out`."""
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    tensors = {**_backbone(generator), **_acoustic(generator), **_codec(generator)}
    if variant == "voices_only":
        withheld = ("audio_tokenizer.encoder_blocks.", "audio_tokenizer.input_proj.")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(withheld)}
    save_file(tensors, out / "consolidated.safetensors", metadata={"format": "pt"})
    (out / "params.json").write_text(json.dumps(params(), indent=2) + "\n")
    (out / "tekken.json").write_text(json.dumps(_tekken()) + "\n")
    (out / "voice_embedding").mkdir()
    for name, frames in VOICES.items():
        voice = torch.randn(frames, WIDTH, generator=generator)
        torch.save(voice.to(torch.bfloat16), out / "voice_embedding" / f"{name}.pt")


def _tekken() -> dict[str, Any]:
    """A tokenizer of bytes."""
    others = (t.value for t in SpecialTokens if t.value not in REAL_IDS)
    at = {rank: token for token, rank in REAL_IDS.items()}
    special = [at.get(rank) or next(others, f"<SPECIAL_{rank}>") for rank in range(SPECIAL_TOKENS)]
    return {
        "audio": {
            "audio_encoding_config": {"hop_length": 1, "num_mel_bins": 1, "window_size": 1},
            "frame_rate": 12.5,
            "sampling_rate": SAMPLE_RATE,
            "voice_num_audio_tokens": VOICES,
        },
        "config": {
            "default_num_special_tokens": SPECIAL_TOKENS,
            "default_vocab_size": VOCABULARY,
            "num_vocab_tokens": 256,
            "pattern": PATTERN,
            "version": "v13",
        },
        "special_tokens": [
            {"is_control": True, "rank": rank, "token_str": token}
            for rank, token in enumerate(special)
        ],
        "type": "Tekken",
        "version": 1,
        "vocab": [
            {
                "rank": byte,
                "token_bytes": base64.b64encode(bytes([byte])).decode(),
                "token_str": None,
            }
            for byte in range(256)
        ],
    }


def _backbone(generator: torch.Generator) -> dict[str, torch.Tensor]:
    def drawn(out: int, width: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, width, generator=generator) * (gain / width**0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(WIDTH, generator=generator)

    codes = padded(SEMANTIC + SPECIAL_CODES + GROUPS * (LEVELS + SPECIAL_CODES))
    embeddings = "mm_audio_embeddings."
    tensors = {
        f"{embeddings}tok_embeddings.weight": torch.randn(VOCABULARY, WIDTH, generator=generator),
        f"{embeddings}audio_codebook_embeddings.embeddings.weight": torch.randn(
            codes, WIDTH, generator=generator
        ),
        "norm.weight": norm(),
    }
    for index in range(LAYERS):
        attention, mlp = f"layers.{index}.attention", f"layers.{index}.feed_forward"
        tensors |= {
            f"{attention}.wq.weight": drawn(HEADS * HEAD_DIM, WIDTH, 1.6),
            f"{attention}.wk.weight": drawn(KV_HEADS * HEAD_DIM, WIDTH, 1.6),
            f"{attention}.wv.weight": drawn(KV_HEADS * HEAD_DIM, WIDTH, 1.5),
            f"{attention}.wo.weight": drawn(WIDTH, HEADS * HEAD_DIM, 1.5),
            f"{mlp}.w1.weight": drawn(INNER, WIDTH),
            f"{mlp}.w2.weight": drawn(WIDTH, INNER),
            f"{mlp}.w3.weight": drawn(INNER, WIDTH),
            f"layers.{index}.attention_norm.weight": norm(),
            f"layers.{index}.ffn_norm.weight": norm(),
        }
    return tensors


def _acoustic(generator: torch.Generator) -> dict[str, torch.Tensor]:
    config = VoxtralAcousticConfig(**_own(acoustic_args(), VoxtralAcousticConfig))
    model = AcousticTransformer(config, SEMANTIC + SPECIAL_CODES, LEVELS, GROUPS)
    randomize(model, generator)
    shape_logits(model.semantic_codebook_output, spread=3.0, stop={END: STOP})
    with torch.no_grad():
        model.acoustic_codebook_output.weight.mul_(SPEED)
    return {f"acoustic_transformer.{name}": t for name, t in model.state_dict().items()}


@torch.no_grad()
def _codec(generator: torch.Generator) -> dict[str, torch.Tensor]:
    config = VoxtralCodecConfig(**_own(codec_args(), VoxtralCodecConfig))
    encoder, decoder = CodecEncoder(config).eval(), CodecDecoder(config).eval()
    for part in (encoder, decoder):
        randomize(part, generator)
        for name, param in part.named_parameters():
            if name.endswith("_scale"):
                param.copy_(0.5 + 0.1 * torch.randn(param.shape, generator=generator))
    _spread_codebook(encoder, generator)
    decoder.quantizer.load_state_dict(encoder.quantizer.state_dict())
    codes = torch.cat(
        [
            torch.randint(SEMANTIC, (1, 32, 1), generator=generator),
            torch.randint(LEVELS, (1, 32, GROUPS), generator=generator),
        ],
        dim=-1,
    )
    conv: nn.Conv1d = decoder.output_proj.conv
    set_level(conv, lambda: decoder(codes), rms=0.15)
    own = {**encoder.state_dict(), **decoder.state_dict()}
    return {f"audio_tokenizer.{name}": tensor.contiguous() for name, tensor in own.items()}


def _spread_codebook(encoder: CodecEncoder, generator: torch.Generator) -> None:
    """Put the entries where the latents of a sound are."""
    heard = torch.from_numpy(sound(2.0, SAMPLE_RATE, seed=3))[None]
    latents: list[torch.Tensor] = []
    hook = encoder.encoder_blocks[-1].register_forward_hook(lambda *call: latents.append(call[2]))
    encoder(heard)
    hook.remove()
    book = encoder.quantizer.semantic_codebook
    semantic = latents[0][0, :, : book.embedding_sum.shape[1]]
    noise = torch.randn(book.embedding_sum.shape, generator=generator)
    usage = 0.5 + torch.rand(book.cluster_usage.shape, generator=generator)
    book.cluster_usage.copy_(usage)
    book.embedding_sum.copy_((semantic.mean(dim=0) + semantic.std() * noise) * usage[:, None])


def _own(args: dict[str, Any], kind: type) -> dict[str, Any]:
    return {key: value for key, value in args.items() if key in kind.__annotations__}
