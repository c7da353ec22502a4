# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2's transformers over the few positions of one frame, for a batch of frames.

Reference: `VoxCPMLocEnc`, `VoxCPMLocDiTV2` and `UnifiedCFM` of the authors' package. A frame is a
patch of latents, [patch, latent size]; it is drawn by following a flow from noise with Euler steps,
guided (CFG-Zero*: what guidance leads away from is scaled to fit, and the first step stands still).
"""

import math

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.models.minicpm_shape import MiniCPMShape

STILL_STEPS = 0.04
"""Share of the times whose steps stand still; at least one does."""
_TIME_SCALE = 1000.0


class _Attention(nn.Module):
    """Of every position to every one."""

    def __init__(self, shape: MiniCPMShape) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        own, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, own, bias=False)
        self.k_proj = nn.Linear(shape.width, kv, bias=False)
        self.v_proj = nn.Linear(shape.width, kv, bias=False)
        self.o_proj = nn.Linear(own, shape.width, bias=False)

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, rotation), _rotated(key, rotation)
        made = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.o_proj(made.transpose(1, 2).flatten(2))


def _rotated(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Heads [b, h, n, d] by cosines and sines, float32 [2, n, d]."""
    cos, sin = rotation
    wide = heads.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)


class _Network(nn.Module):
    def __init__(self, shape: MiniCPMShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    def __init__(self, shape: MiniCPMShape) -> None:
        super().__init__()
        self._scale = shape.residual_scale
        self.self_attn = _Attention(shape)
        self.mlp = _Network(shape)
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.eps)

    def forward(self, stream: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        stream = stream + self._scale * self.self_attn(self.input_layernorm(stream), rotation)
        return stream + self._scale * self.mlp(self.post_attention_layernorm(stream))


class LocalTransformer(nn.Module):
    """MiniCPM4's layers without a mask.

    Args:
        shape: Of it.
        positions: Most of them.
    """

    def __init__(self, shape: MiniCPMShape, positions: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.eps)
        self.rotation: torch.Tensor
        self.register_buffer("rotation", _rotation(shape, positions), persistent=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """[b, n, width] -> the same (final norm's)."""
        rotation = self.rotation[:, : stream.shape[1]]
        for layer in self.layers:
            stream = layer(stream, rotation)
        return self.norm(stream)


def _rotation(shape: MiniCPMShape, positions: int) -> torch.Tensor:
    """Cosines and sines of long RoPE, float32 [2, positions, head_dim]."""
    assert shape.rope is not None
    original = shape.rope["original_max_position_embeddings"]
    factors = torch.tensor(shape.rope["long_factor"], dtype=torch.float32)
    even = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    inverse = 1.0 / (factors * shape.rope["rope_theta"] ** (even / shape.head_dim))
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse).repeat(1, 2)
    scale = math.sqrt(1 + math.log(shape.max_position / original) / math.log(original))
    return torch.stack([angles.cos(), angles.sin()]) * scale


class LocalEncoder(nn.Module):
    """Frames to embeddings.

    Args:
        shape: Of its transformer.
        patch: Latents of a frame.
        latent_size: Numbers of a latent.
    """

    def __init__(self, shape: MiniCPMShape, patch: int, latent_size: int) -> None:
        super().__init__()
        self.special_token = nn.Parameter(torch.zeros(1, 1, 1, shape.width))
        self.in_proj = nn.Linear(latent_size, shape.width)
        self.encoder = LocalTransformer(shape, patch + 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """[b, patch, latent size] -> [b, width]."""
        first = self.special_token[0].expand(len(frames), -1, -1)
        return self.encoder(torch.cat([first, self.in_proj(frames)], dim=1))[:, 0]


class _TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, width]."""
        half = self.linear_1.in_features // 2
        rates = torch.arange(half, dtype=times.dtype, device=times.device)
        rates = torch.exp(rates * -(math.log(10000) / (half - 1)))
        angles = _TIME_SCALE * times[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.linear_2(functional.silu(self.linear_1(waves)))


class LocalDiT(nn.Module):
    """Says where the flow goes.

    Args:
        shape: Of its transformer.
        patch: Latents of a frame.
        latent_size: Numbers of a latent.
    """

    def __init__(self, shape: MiniCPMShape, patch: int, latent_size: int) -> None:
        super().__init__()
        self._patch = patch
        self.in_proj = nn.Linear(latent_size, shape.width)
        self.cond_proj = nn.Linear(latent_size, shape.width)
        self.out_proj = nn.Linear(shape.width, latent_size)
        self.time_mlp = _TimeEmbedding(shape.width)
        self.delta_time_mlp = _TimeEmbedding(shape.width)
        # Two hidden states and a time before the frames.
        self.decoder = LocalTransformer(shape, 3 + 2 * patch)

    def forward(
        self, frames: torch.Tensor, hidden: torch.Tensor, time: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Args:
            frames: [b, patch, latent size]; on their way.
            hidden: [b, 2 * width]; of the language models.
            time: [width]; its embedding.
            last: [b, patch, latent size]; the frames before.

        Returns:
            [b, patch, latent size].
        """
        inputs = [
            hidden.view(len(frames), 2, -1),
            time.expand(len(frames), 1, -1),
            self.cond_proj(last),
            self.in_proj(frames),
        ]
        made = self.decoder(torch.cat(inputs, dim=1))
        return self.out_proj(made[:, -self._patch :])


class Flow(nn.Module):
    """Draws frames.

    Args:
        estimator: Says where the flow goes.
        steps: Of Euler's method.
        guidance: Classifier-free guidance.
        tells_deltas: The network is told how long a step is.
    """

    def __init__(
        self, estimator: LocalDiT, steps: int, guidance: float, tells_deltas: bool
    ) -> None:
        super().__init__()
        self.estimator = estimator
        self._guidance = guidance
        times, self._deltas = _schedule(steps)
        self.times: torch.Tensor
        self.deltas: torch.Tensor
        self.register_buffer("times", torch.tensor(times), persistent=False)
        deltas = self._deltas if tells_deltas else [0.0] * steps
        self.register_buffer("deltas", torch.tensor(deltas), persistent=False)
        self._still = max(1, int((steps + 1) * STILL_STEPS))

    def forward(
        self, hidden: torch.Tensor, last: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """The frames that noise becomes.

        Args:
            hidden: [b, 2 * width]; of the language models.
            last: [b, patch, latent size]; the frames before.
            noise: [b, patch, latent size].

        Returns:
            [b, patch, latent size], in memory of its own (row A-70).
        """
        times = self.estimator.time_mlp(self.times.to(hidden.dtype))
        times = times + self.estimator.delta_time_mlp(self.deltas.to(hidden.dtype))
        # The second half is what guidance leads away from: nothing known but the last frame.
        hidden = torch.cat([hidden, torch.zeros_like(hidden)])
        last = last.repeat(2, 1, 1)
        frames = noise
        for step in range(self._still, len(self._deltas)):
            flow = self.estimator(frames.repeat(2, 1, 1), hidden, times[step], last)
            frames = frames - self._deltas[step] * self._guided(*flow.chunk(2))
        return frames

    def _guided(self, wanted: torch.Tensor, unwanted: torch.Tensor) -> torch.Tensor:
        product = (wanted * unwanted).sum(dim=(1, 2), keepdim=True)
        unwanted = unwanted * (product / (unwanted.square().sum(dim=(1, 2), keepdim=True) + 1e-8))
        return unwanted + self._guidance * (wanted - unwanted)


def _schedule(steps: int) -> tuple[list[float], list[float]]:
    """Where each step begins, and how long it is; short ones first, where there is most noise."""
    even = torch.linspace(1, 0, steps + 1, device="cpu")
    marks = even + (torch.cos(torch.pi / 2 * even) - 1 + even)
    times, deltas = [marks[0]], [marks[0] - marks[1]]
    for mark in marks[2:]:
        times.append(times[-1] - deltas[-1])
        deltas.append(times[-1] - mark)
    return [float(time) for time in times], [float(delta) for delta in deltas]
