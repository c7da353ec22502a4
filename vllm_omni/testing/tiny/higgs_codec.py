# SPDX-License-Identifier: Apache-2.0
"""The codec of the tiny Higgs-Audio checkpoints, at its real frame rate (960 samples a frame)."""

from typing import Any

import torch
from transformers import HiggsAudioV2TokenizerConfig

from vllm_omni.models.higgs_audio_codec import CodecDecoder, CodecEncoder
from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.weights import randomize, set_level

GROUPS = 4
CODES = 1024
SAMPLE_RATE = 24_000
BASE_SEED = 7


def codec_generator(seed: int) -> torch.Generator:
    """For `make_codec`: what is recorded of the codec is of it alone, in whichever checkpoint."""
    return torch.Generator().manual_seed(BASE_SEED + seed)


def codec_config() -> dict[str, Any]:
    """`audio_tokenizer/config.json`; the bandwidth says that there are `GROUPS` codebooks."""
    rates = [8, 5, 4, 2, 3]
    return {
        "acoustic_model_config": {
            "decoder_hidden_size": 64,
            "downsampling_ratios": rates,
            "encoder_hidden_size": 2,
            "hidden_size": 16,
            "model_type": "dac",
            "upsampling_ratios": rates,
        },
        "architectures": ["HiggsAudioV2TokenizerModel"],
        "codebook_dim": 8,
        "codebook_size": CODES,
        "model_type": "higgs_audio_v2_tokenizer",
        "sample_rate": SAMPLE_RATE,
        "semantic_model_config": {
            "conv_dim": [8] * 7,
            "hidden_size": 24,
            "intermediate_size": 32,
            "model_type": "hubert",
            "num_attention_heads": 2,
            "num_conv_pos_embedding_groups": 2,
            "num_conv_pos_embeddings": 8,
            "num_hidden_layers": 2,
        },
        "semantic_sample_rate": 16_000,
        "target_bandwidths": [1.0],
    }


@torch.no_grad()
def make_codec(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The codec's weights: codes depend on the sound, and the sound on the codes."""
    settings = HiggsAudioV2TokenizerConfig(**codec_config())
    encoder, decoder = CodecEncoder(settings).eval(), CodecDecoder(settings).eval()
    for module in (encoder, decoder):
        randomize(module, generator)
    spread_codebooks(encoder, generator)
    decoder.quantizer.load_state_dict(encoder.quantizer.state_dict())
    codes = torch.randint(CODES, (1, GROUPS, 24), generator=generator)
    set_level(decoder.acoustic_decoder.conv2, lambda: decoder(codes), rms=0.15)
    return {**encoder.state_dict(), **decoder.state_dict()}


def spread_codebooks(encoder: CodecEncoder, generator: torch.Generator) -> None:
    """Draw tables over what a recording comes to, stage by stage."""
    heard = torch.from_numpy(sound(2.0, SAMPLE_RATE, seed=3))[None]
    seen: list[torch.Tensor] = []
    hook = encoder.fc.register_forward_hook(lambda *call: seen.append(call[2]))
    encoder(heard)
    hook.remove()
    left = seen[0]
    for quantizer in encoder.quantizer.quantizers:
        points = quantizer.project_in(left)[0]
        center, level = points.mean(dim=0), points.std(dim=0).mean()
        table = torch.randn(quantizer.codebook.embed.shape, generator=generator)
        quantizer.codebook.embed.copy_(center + level * table)
        left = left - quantizer.decode(quantizer.encode(left))
