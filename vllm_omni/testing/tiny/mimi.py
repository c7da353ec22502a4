# SPDX-License-Identifier: Apache-2.0
"""Weights of small Mimi codecs."""

import torch
from transformers import MimiModel

from vllm_omni.testing.media import sound


@torch.no_grad()
def fill_mimi_encoder(encoder: MimiModel, generator: torch.Generator) -> None:
    """Let sound through the convolutions, and spread the codebooks over what comes out."""
    for param in encoder.encoder.parameters():
        if param.dim() > 1:
            param.mul_(3.0)
    heard = torch.from_numpy(sound(2.0, encoder.config.sampling_rate, seed=3))[None, None]
    latents: list[torch.Tensor] = []
    hook = encoder.downsample.register_forward_hook(lambda *call: latents.append(call[2]))
    encoder.encode(heard)
    hook.remove()
    quantizers = (
        encoder.quantizer.semantic_residual_vector_quantizer,
        encoder.quantizer.acoustic_residual_vector_quantizer,
    )
    for quantizer in quantizers:
        projected = quantizer.input_proj(latents[0])
        center, level = projected.mean(dim=(0, 2)), projected.std(dim=2).mean()
        for depth, layer in enumerate(quantizer.layers):
            book = layer.codebook
            table = torch.randn(book.embed_sum.shape, generator=generator) * level * 0.6**depth
            usage = 0.5 + torch.rand(book.cluster_usage.shape, generator=generator)
            book.cluster_usage.copy_(usage)
            book.embed_sum.copy_((table + (center if depth == 0 else 0)) * usage[:, None])
