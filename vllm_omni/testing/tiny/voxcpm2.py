# SPDX-License-Identifier: Apache-2.0
"""Tiny VoxCPM2 (reference: the authors' package `voxcpm` 2.0.3).

Recordings are encoded at the real rate, 640 samples a latent; sound is made at 8 kHz. Weights are
laid out and named as the package saves them, the codec's norms apart.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaTokenizer

from vllm_omni.config.hf.voxcpm2 import VoxCPM2Config
from vllm_omni.models.local_transformers import Flow, LocalDiT, LocalEncoder, LocalTransformer
from vllm_omni.models.minicpm_shape import MiniCPMShape
from vllm_omni.models.voxcpm2_codec import PastConv, PastUpsampling, SoundDecoder, SoundEncoder
from vllm_omni.testing.tiny.tokenizer import TEXT
from vllm_omni.testing.tiny.weights import randomize, set_level

# Chosen so that seed 0 has what the tests assert.
BASE_SEED = 1
WIDTH = 64
LATENTS = 16
HEAD_DIM = 32
TEXT_TOKENS = 500
GO_ON = 0.45
"""How strongly speech goes on."""
CALM = 0.6
"""Factor on the networks that draw frames and make sound of them."""
SPREAD = 1.5
"""Of the logits that say whether it does."""


def config(vocabulary: int) -> dict[str, Any]:
    """`config.json`."""
    factors = [1.0 + 0.05 * index for index in range(HEAD_DIM // 2)]
    local = {
        "ffn_dim": 64,
        "hidden_dim": 48,
        "kv_channels": HEAD_DIM,
        "num_heads": 2,
        "num_layers": 1,
    }
    return {
        "architecture": "voxcpm2",
        "audio_vae_config": {
            "decoder_dim": 64,
            "decoder_rates": [8, 5, 4, 2],
            "depthwise": True,
            "encoder_dim": 4,
            "encoder_rates": [2, 5, 8, 8],
            "latent_dim": LATENTS,
            "out_sample_rate": 8000,
            "sample_rate": 16000,
            "sr_bin_boundaries": [6000, 30000, 40000],
        },
        "device": "cpu",
        "dit_config": {
            **local,
            "cfm_config": {"inference_cfg_rate": 2.0},
            "dit_mean_mode": False,
        },
        "dtype": "float32",
        "encoder_config": local,
        "feat_dim": LATENTS,
        "lm_config": {
            "bos_token_id": 1,
            "dim_model_base": 64,
            "eos_token_id": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "kv_channels": HEAD_DIM,
            "max_position_embeddings": 2048,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": factors,
                "original_max_position_embeddings": 1024,
                "short_factor": [1.0] * len(factors),
                "type": "longrope",
            },
            "rope_theta": 10000,
            "scale_depth": 1.4,
            "scale_emb": 1.5,
            "use_mup": True,
            "vocab_size": vocabulary,
        },
        "max_length": 2048,
        "model_type": "voxcpm2",
        "patch_size": 4,
        "residual_lm_no_rope": True,
        "residual_lm_num_layers": 1,
        "scalar_quantization_latent_dim": 24,
        "scalar_quantization_scale": 9,
    }


class Model(nn.Module):
    """Everything but the codec, named as in a checkpoint; of the language models their weights.

    Args:
        config: The checkpoint's.
    """

    def __init__(self, config: VoxCPM2Config) -> None:
        super().__init__()
        lm, local, dit = config.lm_config, config.encoder_config, config.dit_config
        sizes = (config.patch_size, config.feat_dim)
        shape = MiniCPMShape.of(lm, lm["num_hidden_layers"], no_rope=False)
        residual = MiniCPMShape.of(lm, config.residual_lm_num_layers, no_rope=False)
        within = MiniCPMShape.of(
            lm,
            local["num_layers"],
            no_rope=False,
            width=local["hidden_dim"],
            inner=local["ffn_dim"],
            heads=local["num_heads"],
            head_dim=local["kv_channels"],
        )
        self.base_lm = LocalTransformer(shape, 1)
        self.base_lm.embed_tokens = nn.Embedding(lm["vocab_size"], shape.width)
        self.residual_lm = LocalTransformer(residual, 1)
        self.feat_encoder = LocalEncoder(within, *sizes)
        self.feat_decoder = Flow(LocalDiT(within, *sizes), 10, 2.0, tells_deltas=False)
        self.fsq_layer = nn.ModuleDict(
            {
                "in_proj": nn.Linear(shape.width, config.scalar_quantization_latent_dim),
                "out_proj": nn.Linear(config.scalar_quantization_latent_dim, shape.width),
            }
        )
        self.enc_to_lm_proj = nn.Linear(within.width, shape.width)
        self.lm_to_dit_proj = nn.Linear(shape.width, dit["hidden_dim"])
        self.res_to_dit_proj = nn.Linear(shape.width, dit["hidden_dim"])
        self.fusion_concat_proj = nn.Linear(2 * shape.width, shape.width)
        self.stop_proj = nn.Linear(shape.width, shape.width)
        self.stop_head = nn.Linear(shape.width, 2, bias=False)


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(out)
    whole = config(len(tokenizer))
    (out / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    made = VoxCPM2Config(**whole)
    model = Model(made)
    randomize(model, generator)
    _calm(model)
    _let_speech_go_on(model)
    save_file(model.state_dict(), out / "model.safetensors", {"format": "pt"})
    save_file(codec_tensors(made, generator), out / "audiovae.safetensors", {"format": "pt"})


@torch.no_grad()
def _calm(model: Model) -> None:
    """Keep what rounding does to a frame from growing with each frame that follows."""
    for parameter in model.feat_decoder.parameters():
        if parameter.dim() == 2:
            parameter.mul_(CALM)


@torch.no_grad()
def _let_speech_go_on(model: Model) -> None:
    """Of what stopping is judged by, one number is always the same."""
    model.stop_proj.weight[0] = 0.0
    model.stop_proj.bias[0] = 4.0
    model.stop_head.weight.mul_(SPREAD)
    model.stop_head.weight[:, 0] = torch.tensor([GO_ON, 0.0])


@torch.no_grad()
def codec_tensors(config: VoxCPM2Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The codec's weights, as they are saved."""
    codec = config.audio_vae_config
    encoder, decoder = SoundEncoder(codec), SoundDecoder(codec)
    for module in (encoder, decoder):
        randomize(module, generator)
        for name, parameter in module.named_parameters():
            if parameter.dim() == 3 and parameter.shape[0] > 1:
                # Snake activations amplify rounding where their input is large.
                parameter.mul_(CALM)
            if name.endswith("alpha") or "scale_embed" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    latents = torch.randn(1, 24, codec["latent_dim"], generator=generator)
    set_level(decoder.model[-2], lambda: decoder.samples(latents), rms=0.2)
    return {**_norms_apart(encoder, "encoder."), **_norms_apart(decoder, "decoder.")}


def _norms_apart(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    tensors = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    for name, part in module.named_modules():
        if isinstance(part, PastConv | PastUpsampling):
            weight = tensors.pop(f"{prefix}{name}.weight")
            norm = weight.flatten(1).norm(dim=1).view(-1, 1, 1)
            tensors[f"{prefix}{name}.weight_g"] = norm
            tensors[f"{prefix}{name}.weight_v"] = weight * 0.5
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _tokenizer() -> LlamaTokenizer:
    """Llama's kind, some of whose tokens are several Chinese characters."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        min_frequency=1,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    made.train_from_iterator([TEXT, *["你好 世界 今天"] * 50], trainer)
    saved = json.loads(made.to_str())["model"]
    return LlamaTokenizer(vocab=saved["vocab"], merges=[tuple(each) for each in saved["merges"]])
