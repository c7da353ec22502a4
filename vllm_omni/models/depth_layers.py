# SPDX-License-Identifier: Apache-2.0
"""A small decoder over the codes of one frame, for many requests at once.

A frame has tens of codes, each of which waits for the one before it: what a step takes is the
number of kernels, not their work. So projections of one input are one matrix, normalization,
rotation and gating are vLLM's fused kernels, and keys and values lie in one tensor of the frame's
length. (Reference: the decoder layers of transformers' Qwen3 and Llama.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope


@dataclass(frozen=True, slots=True)
class DepthConfig:
    """Sizes of such a decoder.

    Attributes:
        width: Hidden size.
        inner: Width of the feed-forward network.
        layers: How many.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_size: Width of each.
        eps: Of the normalization.
        rope_parameters: As transformers' configs have them.
        positions: Inputs of a frame.
        head_norm: Queries and keys are normalized (Qwen3).
    """

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    rope_parameters: dict[str, Any]
    positions: int
    head_norm: bool

    @classmethod
    def of(cls, config: Any, positions: int, *, head_norm: bool) -> "DepthConfig":
        """From a decoder config of transformers."""
        return cls(
            width=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            positions=positions,
            head_norm=head_norm,
        )


class DepthAttention(nn.Module):
    """Causal attention; keys and values of the frame are the caller's."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self._config = config
        size = config.head_size
        self._split = [config.heads * size, config.kv_heads * size, config.kv_heads * size]
        self.qkv_proj = nn.Linear(config.width, sum(self._split), bias=False)
        self.o_proj = nn.Linear(config.heads * size, config.width, bias=False)
        if config.head_norm:
            self.q_norm = RMSNorm(size, config.eps)
            self.k_norm = RMSNorm(size, config.eps)
        self._rotation = get_rope(size, config.positions, rope_parameters=config.rope_parameters)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, start: int, frame: torch.Tensor
    ) -> torch.Tensor:
        """[b, n, width] -> the same.

        Args:
            hidden: Inputs of the frame, from `start` on.
            positions: int64 [b * n], of each.
            start: See `hidden`.
            frame: [2, b, positions, kv_heads, head_size]; keys and values of what came before, to
                which those of `hidden` are added.
        """
        config = self._config
        batch, count, _ = hidden.shape
        stop = start + count
        query, key, value = self.qkv_proj(hidden).view(batch * count, -1).split(self._split, dim=-1)
        if config.head_norm:
            query = self.q_norm(query.reshape(-1, config.head_size)).view(batch * count, -1)
            key = self.k_norm(key.reshape(-1, config.head_size)).view(batch * count, -1)
        query, key = self._rotated(positions, query, key)
        shape = (batch, count, -1, config.head_size)
        frame[0, :, start:stop] = key.view(shape)
        frame[1, :, start:stop] = value.reshape(shape)
        attended = scaled_dot_product_attention(
            query.reshape(shape).transpose(1, 2),
            frame[0, :, :stop].transpose(1, 2),
            frame[1, :, :stop].transpose(1, 2),
            is_causal=count > 1,
            enable_gqa=config.heads != config.kv_heads,
        )
        return self.o_proj(attended.transpose(1, 2).reshape(batch, count, -1))

    def _rotated(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotate = self._rotation.forward_cuda if query.is_cuda else self._rotation.forward_native
        query, rotated = rotate(positions, query.contiguous(), key.contiguous())
        assert rotated is not None
        return query, rotated


class DepthFeedForward(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.width, bias=False)
        self._gated = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, n, width] -> the same."""
        gated = self._gated.forward_cuda if hidden.is_cuda else self._gated.forward_native
        return self.down_proj(gated(self.gate_up_proj(hidden)))


class DepthLayer(nn.Module):
    """One layer; what it adds to is kept apart, as vLLM's fused normalization takes it."""

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.self_attn = DepthAttention(config)
        self.mlp = DepthFeedForward(config)
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)

    def forward(
        self,
        added: torch.Tensor,
        hidden: torch.Tensor | None,
        positions: torch.Tensor,
        start: int,
        frame: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be added to the hidden states, and these, each [b, n, width]."""
        if hidden is None:
            inputs, hidden = self.input_layernorm(added), added
        else:
            inputs, hidden = self.input_layernorm(added, hidden)
        attended = self.self_attn(inputs, positions, start, frame)
        inputs, hidden = self.post_attention_layernorm(attended, hidden)
        return self.mlp(inputs), hidden


class DepthTransformer(nn.Module):
    """The decoder.

    Args:
        config: Its sizes.
    """

    def __init__(self, config: DepthConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DepthLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)

    def new_frames(self, batch: int) -> torch.Tensor:
        """Room for keys and values, [layers, 2, batch, positions, kv_heads, head_size]."""
        config = self.config
        shape = (config.layers, 2, batch, config.positions, config.kv_heads, config.head_size)
        return self.norm.weight.new_empty(shape)

    def forward(self, inputs: torch.Tensor, start: int, frames: torch.Tensor) -> torch.Tensor:
        """Hidden states of the last of some further inputs.

        Args:
            inputs: [b, n, width]; written over by vLLM's normalization, which adds in place.
            start: How many inputs the frames have had.
            frames: See `new_frames`; takes these inputs' keys and values.

        Returns:
            [b, width].
        """
        batch, count, _ = inputs.shape
        positions = torch.arange(start, start + count, device=inputs.device).repeat(batch)
        added, hidden = inputs, None
        for index, layer in enumerate(self.layers):
            added, hidden = layer(added, hidden, positions, start, frames[index])
        assert hidden is not None
        # The normalization may write into what it is given.
        last, _ = self.norm(added[:, -1].contiguous(), hidden[:, -1].contiguous())
        return last

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights by transformers' names, in which projections of one input are apart."""
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            head, _, tail = name.rpartition("_proj.")
            merged, offset = self._merged(head.rpartition(".")[2])
            target = f"{head.rpartition('.')[0]}.{merged}_proj.{tail}" if merged else name
            own[target].data[offset : offset + len(weight)].copy_(weight)
            loaded.add(target)
        return loaded

    def _merged(self, projection: str) -> tuple[str, int]:
        """The merged projection that one is a part of, and where it begins there."""
        query = self.config.heads * self.config.head_size
        key = self.config.kv_heads * self.config.head_size
        parts = {
            "q": ("qkv", 0),
            "k": ("qkv", query),
            "v": ("qkv", query + key),
            "gate": ("gate_up", 0),
            "up": ("gate_up", self.config.inner),
        }
        return parts.get(projection, ("", 0))
