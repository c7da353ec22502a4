# SPDX-License-Identifier: Apache-2.0
"""The transformer's forward for training: as diffusers' own computes, without loops over rows.

Captions are padded to one length in front of the picture's tokens, and masked; positions are those
that each caption has when its picture follows it at once, as attention knows no other order.
"""

import torch
import torch.nn.functional as F
from diffusers import Lumina2Transformer2DModel
from diffusers.models.attention_processor import Attention
from torch import Tensor

Turns = tuple[Tensor, Tensor]
"""Cosines and sines, each [rows, tokens, 1, half of a head]."""


class RealAttention:
    """Lumina's attention with its rotation in real numbers, which compile."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Turns | None = None,
    ) -> Tensor:
        shape = (*hidden_states.shape[:2], attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states).view(shape))
        key = attn.norm_k(attn.to_k(hidden_states).view(shape))
        value = attn.to_v(hidden_states).view(shape)
        query, key = _turned(query, image_rotary_emb), _turned(key, image_rotary_emb)
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(
            query.to(value.dtype).transpose(1, 2),
            key.to(value.dtype).transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            scale=attn.scale,
        )
        return attn.to_out[0](mixed.transpose(1, 2).flatten(2))


def _turned(states: Tensor, turns: Turns) -> Tensor:
    cosine, sine = turns
    real, imaginary = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(turned, dim=-1).flatten(-2)


class BatchedForward:
    """The `transformer`'s velocities; its blocks are compiled where `compiled`."""

    def __init__(self, transformer: Lumina2Transformer2DModel, *, compiled: bool) -> None:
        self._model = transformer
        self._freqs = list(transformer.rope_embedder.freqs_cis)
        attention = RealAttention()
        for module in transformer.modules():
            if isinstance(module, Attention):
                module.set_processor(attention)
        if compiled:
            for block in [
                *transformer.context_refiner,
                *transformer.noise_refiner,
                *transformer.layers,
            ]:
                block.compile(dynamic=False)

    def __call__(self, latents: Tensor, times: Tensor, captions: Tensor, mask: Tensor) -> Tensor:
        """Of latents [rows, channels, height, width] at times [rows], 0 being noise.

        `captions` is [rows, tokens, width], and `mask` [rows, tokens] says which tokens are.
        """
        model, p = self._model, self._model.config.patch_size
        rows, channels, height, width = latents.shape
        high, wide = height // p, width // p
        patches = latents.view(rows, channels, high, p, wide, p).permute(0, 2, 4, 3, 5, 1)
        embedded, text = model.time_caption_embed(latents, times, captions)
        states = model.x_embedder(patches.flatten(3).flatten(1, 2))
        text_turns, picture_turns = self._turns(mask, high, wide)
        for block in model.context_refiner:
            text = block(text, mask, text_turns)
        for block in model.noise_refiner:
            states = block(states, None, picture_turns, embedded)
        tokens = text.shape[1]
        states = torch.cat([text, states.to(text.dtype)], dim=1)
        whole = torch.cat([mask, mask.new_ones(rows, high * wide)], dim=1)
        both = tuple(torch.cat(pair, dim=1) for pair in zip(text_turns, picture_turns, strict=True))
        for block in model.layers:
            states = block(states, whole, both, embedded)
        states = model.norm_out(states, embedded)[:, tokens:]
        states = states.view(rows, high, wide, p, p, channels).permute(0, 5, 1, 3, 2, 4)
        return states.reshape(rows, channels, height, width)

    def _turns(self, mask: Tensor, high: int, wide: int) -> tuple[Turns, Turns]:
        """Of the caption's tokens and of the picture's, which all come after the caption."""
        rows, tokens = mask.shape
        device = mask.device
        after = mask.sum(dim=1)[:, None].expand(-1, high * wide)
        zeros = torch.zeros(rows, tokens, dtype=torch.long, device=device)
        order = torch.arange(tokens, device=device).expand(rows, -1)
        row = torch.arange(high, device=device).repeat_interleave(wide).expand(rows, -1)
        column = torch.arange(wide, device=device).repeat(high).expand(rows, -1)
        return self._at((order, zeros, zeros)), self._at((after, row, column))

    def _at(self, positions: tuple[Tensor, Tensor, Tensor]) -> Turns:
        self._freqs = [freqs.to(positions[0].device) for freqs in self._freqs]
        turns = [freqs[index] for freqs, index in zip(self._freqs, positions, strict=True)]
        turn = torch.cat(turns, dim=-1)[:, :, None]
        return turn.real.float(), turn.imag.float()
