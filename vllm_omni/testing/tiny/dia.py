# SPDX-License-Identifier: Apache-2.0
"""Tiny Dia (reference: transformers 5), with its real delays, codes and rate of frames.

Heads keep their proportions (twice as many of cross-attention as the cache has); sizes and depths
are reduced. The codec is a folder of the checkpoint, so nothing else is needed to run it.
"""

from pathlib import Path

import torch
from transformers import (
    DacConfig,
    DacModel,
    DiaConfig,
    DiaFeatureExtractor,
    DiaForConditionalGeneration,
    DiaTokenizer,
    GenerationConfig,
)

from vllm_omni.testing.media import sound
from vllm_omni.testing.tiny.weights import randomize, set_level, shape_logits

# Chosen so that seed 0 has what the tests assert: speech that ends by itself on some texts.
BASE_SEED = 1
SAMPLE_RATE = 44_100
GROUPS = 9
CODES = 1024
END = 1024
HEAD_DIM = 16
STOP = 2.6
"""Factor on the logit of the end."""


def config() -> DiaConfig:
    """`config.json`."""
    return DiaConfig(
        encoder_config={
            "head_dim": HEAD_DIM,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
        },
        decoder_config={
            "cross_head_dim": HEAD_DIM,
            "cross_hidden_size": 32,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
            "head_dim": HEAD_DIM,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
        },
        architectures=["DiaForConditionalGeneration"],
        dtype="float32",
    )


def codec_config() -> DacConfig:
    """`audio_tokenizer/config.json`."""
    return DacConfig(
        codebook_dim=8,
        codebook_size=CODES,
        decoder_hidden_size=32,
        downsampling_ratios=[2, 4, 8, 8],
        encoder_hidden_size=2,
        n_codebooks=GROUPS,
        sampling_rate=SAMPLE_RATE,
    )


def write(out: Path, seed: int) -> None:
    """Write the whole checkpoint into `out`."""
    generator = torch.Generator().manual_seed(BASE_SEED + seed)
    model = DiaForConditionalGeneration(config()).eval()
    randomize(model, generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("q_proj.weight"):
                param.mul_(HEAD_DIM**-0.5)  # Dia does not scale the scores
    shape_logits(model.logits_dense, spread=3.0, stop={END: STOP})
    model.generation_config = GenerationConfig(
        bos_token_id=1026,
        do_sample=True,
        eos_token_id=END,
        guidance_scale=3.0,
        pad_token_id=1025,
        temperature=1.8,
        top_k=45,
        top_p=0.9,
    )
    model.save_pretrained(out)
    DiaTokenizer().save_pretrained(out)
    DiaFeatureExtractor(sampling_rate=SAMPLE_RATE, hop_length=512).save_pretrained(out)
    make_codec(generator).save_pretrained(out / "audio_tokenizer")


@torch.no_grad()
def make_codec(generator: torch.Generator) -> DacModel:
    """DAC with weights of which codes depend on the sound, and the sound on the codes."""
    codec = DacModel(codec_config()).eval()
    randomize(codec, generator)
    for param in codec.encoder.parameters():
        if param.dim() == 3 and param.shape[-1] > 1:
            param.mul_(1.5)
    for name, param in codec.named_parameters():
        if name.endswith("alpha"):
            param.copy_(1 + 0.1 * torch.randn(param.shape, generator=generator))
    heard = torch.from_numpy(sound(1.0, SAMPLE_RATE, seed=3))[None, None, : 80 * 512]
    latents = codec.encoder(heard)
    level = float(latents.std())
    for quantizer in codec.quantizer.quantizers:
        quantizer.in_proj.weight.div_(level)
        quantizer.out_proj.weight.mul_(0.5 * level)
    codes = torch.randint(CODES, (1, GROUPS, 32), generator=generator)
    codec.decoder.tanh = torch.nn.Identity()
    set_level(codec.decoder.conv2, lambda: codec.decode(audio_codes=codes).audio_values, rms=0.15)
    codec.decoder.tanh = torch.nn.Tanh()
    return codec
