# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS's flow-matching transformer, over a batch of frames at once.

It makes the acoustic codes of a frame out of noise, given the hidden state that the frame's first
code was sampled from: Euler steps along a velocity that a small transformer gives for three
vectors (the codes so far, the time, the hidden state), with classifier-free guidance against no
hidden state. What does not change from step to step is computed once per frame, and what does not
change from frame to frame once per dtype (row B-42).

Described by the published checkpoint and its implementation.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.config.hf.voxtral_tts import VoxtralAcousticConfig, padded

GUIDANCE = 1.2
"""Weight of classifier-free guidance, unless a request says another."""
_TIME_THETA = 10000.0


class FeedForward(nn.Module):
    """SwiGLU, named as Mistral names it."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=bias)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        return self.w2(functional.silu(self.w1(inputs)) * self.w3(inputs))


class _Attention(nn.Module):
    """Every position attends to every other one; where they are is not told."""

    def __init__(self, config: VoxtralAcousticConfig) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, queries, bias=config.use_biases)
        self.wk = nn.Linear(config.dim, keys, bias=False)
        self.wv = nn.Linear(config.dim, keys, bias=config.use_biases)
        self.wo = nn.Linear(queries, config.dim, bias=config.use_biases)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: VoxtralAcousticConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.use_biases)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs + self.attention(self.attention_norm(inputs))
        return hidden + self.feed_forward(self.ffn_norm(hidden))


class _Schedule(NamedTuple):
    """What the Euler steps have in common, whatever the frame.

    Attributes:
        times: Projected embedding of each step's time, [steps, dim].
        lengths: Of each step, [steps].
    """

    times: torch.Tensor
    lengths: torch.Tensor


class AcousticTransformer(nn.Module):
    """The transformer, with the head of the first codes, which the checkpoint keeps here.

    Args:
        config: Its own.
        semantic_codes: First codes, special ones included.
        levels: Of an acoustic code.
        groups: Acoustic codes per frame.
    """

    def __init__(
        self, config: VoxtralAcousticConfig, semantic_codes: int, levels: int, groups: int
    ) -> None:
        super().__init__()
        width = config.dim
        self._dim, self._steps, self._levels = width, int(config.n_decoding_steps or 0), levels
        self.input_projection = nn.Linear(groups, width, bias=False)
        self.time_projection = nn.Linear(width, width, bias=False)
        self.llm_projection = nn.Linear(config.input_dim, width, bias=False)
        self.semantic_codebook_output = nn.Linear(
            width, padded(semantic_codes), bias=config.use_biases
        )
        self.acoustic_codebook_output = nn.Linear(width, groups, bias=False)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self._schedules: dict[torch.dtype, _Schedule] = {}

    def codes(
        self, hidden: torch.Tensor, noise: torch.Tensor, guidance: torch.Tensor | None
    ) -> torch.Tensor:
        """The acoustic codes of each frame.

        Args:
            hidden: [b, input_dim]; what the frames' first codes were sampled from.
            noise: [b, groups], standard normal; where the flow starts.
            guidance: float32 [b]; NaN, or None for all, is `GUIDANCE`.

        Returns:
            int64 [b, groups], in [0, levels).
        """
        schedule = self._schedule(hidden.dtype)
        weight = _weight(guidance, hidden)
        condition = self.llm_projection(hidden)
        # The projection has no bias: no hidden state is zero after it, too.
        conditions = torch.cat([condition, torch.zeros_like(condition)])
        sample = noise.to(hidden.dtype)
        for time, length in zip(schedule.times, schedule.lengths, strict=True):
            both = torch.cat([sample, sample])
            velocity, free = self._predict_velocity(
                both, conditions, time.expand(len(both), -1)
            ).chunk(2)
            sample = sample + (weight * velocity + (1 - weight) * free) * length
        scaled = (sample.clamp(-1, 1) + 1) / 2 * (self._levels - 1)
        return scaled.round().long()

    def _predict_velocity(
        self, x_t: torch.Tensor, llm_proj: torch.Tensor, t_proj: torch.Tensor
    ) -> torch.Tensor:
        """Where the codes move at a time, [n, groups], given what has been projected already."""
        hidden = torch.stack([self.input_projection(x_t), t_proj, llm_proj], dim=1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.acoustic_codebook_output(self.norm(hidden[:, 0]))

    def _schedule(self, dtype: torch.dtype) -> _Schedule:
        """Made with the first frame: the weights are there by then."""
        if dtype not in self._schedules:
            device = self.time_projection.weight.device
            times = torch.linspace(0, 1, self._steps + 1, device=device).to(dtype)
            embeddings = self._time_embeddings(times[:-1].float()).to(dtype)
            lengths = times[1:] - times[:-1]
            self._schedules[dtype] = _Schedule(self.time_projection(embeddings), lengths)
        return self._schedules[dtype]

    def _time_embeddings(self, times: torch.Tensor) -> torch.Tensor:
        """Sinusoids, float32 [n] -> [n, dim]."""
        half = self._dim // 2
        steps = torch.arange(half, device=times.device, dtype=torch.float32) / half
        angles = times[:, None] * torch.exp(-math.log(_TIME_THETA) * steps)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _weight(guidance: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor | float:
    """As it is multiplied with velocities, [b, 1] or a number."""
    if guidance is None:
        return GUIDANCE
    return torch.where(guidance.isnan(), GUIDANCE, guidance).to(hidden.dtype)[:, None]
