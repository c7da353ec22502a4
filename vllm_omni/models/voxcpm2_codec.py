# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2's codec: sound at one rate to latents, latents to sound at another.

Reference: `AudioVAE` (v2) of the authors' package. Every convolution sees the past alone. Names of
modules are the checkpoint's; its weight norms are multiplied out when it is loaded.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_KERNEL = 7
_DILATIONS = (1, 3, 9)


class Snake(nn.Module):
    """An activation with a period of its own for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, channels, n] -> the same."""
        return hidden + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * hidden).square()


class PastConv(nn.Conv1d):
    """A convolution over what came before; with a stride, each step sees as much before its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, channels, n] -> [b, channels, n / stride]."""
        seen = self.dilation[0] * (self.kernel_size[0] - 1) + 1
        return super().forward(functional.pad(hidden, (seen - self.stride[0], 0)))


class PastUpsampling(nn.ConvTranspose1d):
    """Its inverse: a step's samples depend on it and on the one before."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, channels, n] -> [b, channels, n * stride]."""
        return super().forward(hidden)[..., : -self.stride[0]]


class ResidualUnit(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int, dilation: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(width),
            PastConv(width, width, _KERNEL, dilation=dilation, groups=groups),
            Snake(width),
            PastConv(width, width, 1),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, width, n] -> the same."""
        return hidden + self.block(hidden)


def _units(width: int, groups: int) -> list[ResidualUnit]:
    return [ResidualUnit(width, dilation, groups) for dilation in _DILATIONS]


class Block(nn.Module):
    """A change of rate, with residual units where the rate is higher."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*parts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, channels, n] -> the same at the other rate."""
        return self.block(hidden)


class SoundEncoder(nn.Module):
    """Sound to latents.

    Args:
        config: The checkpoint's `audio_vae_config`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["encoder_dim"]
        parts: list[nn.Module] = [PastConv(1, width, _KERNEL)]
        for stride in config["encoder_rates"]:
            down = PastConv(width, 2 * width, 2 * stride, stride=stride)
            groups = width if config["depthwise"] else 1
            parts.append(Block(*_units(width, groups), Snake(width), down))
            width *= 2
        self.block = nn.Sequential(*parts)
        self.fc_mu = PastConv(width, config["latent_dim"], 3)
        self.hop = math.prod(config["encoder_rates"])

    def latents(self, samples: torch.Tensor) -> torch.Tensor:
        """[b, samples], of whole latents -> [b, n, latent size]."""
        return self.fc_mu(self.block(samples[:, None])).transpose(1, 2)


class RateConditioning(nn.Module):
    """A scale and a shift for the rate that sound is wanted at."""

    def __init__(self, rates: int, width: int) -> None:
        super().__init__()
        self.scale_embed = nn.Embedding(rates, width)
        self.bias_embed = nn.Embedding(rates, width)

    def forward(self, hidden: torch.Tensor, rate: int) -> torch.Tensor:
        """[b, width, n] -> the same."""
        scale, bias = self.scale_embed.weight[rate], self.bias_embed.weight[rate]
        return hidden * scale[:, None] + bias[:, None]


class SoundDecoder(nn.Module):
    """Latents to sound, at the codec's highest rate.

    Args:
        config: The checkpoint's `audio_vae_config`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size, width = config["latent_dim"], config["decoder_dim"]
        depthwise = config["depthwise"]
        parts: list[nn.Module] = [PastConv(size, width, _KERNEL)]
        if depthwise:
            parts = [PastConv(size, size, _KERNEL, groups=size), PastConv(size, width, 1)]
        conditions: list[nn.Module | None] = [None] * len(parts)
        bounds = config["sr_bin_boundaries"]
        for stride in config["decoder_rates"]:
            narrow = width // 2
            up = PastUpsampling(width, narrow, 2 * stride, stride=stride)
            parts.append(Block(Snake(width), up, *_units(narrow, narrow if depthwise else 1)))
            conditions.append(RateConditioning(len(bounds) + 1, width) if bounds else None)
            width = narrow
        parts += [Snake(width), PastConv(width, 1, _KERNEL), nn.Tanh()]
        conditions += [None] * 3
        self.model = nn.ModuleList(parts)
        if bounds:
            self.sr_cond_model = nn.ModuleList(conditions)
        self._conditions = conditions
        self._rate = sum(bound < config["out_sample_rate"] for bound in bounds or ())
        self.hop = math.prod(config["decoder_rates"])

    def samples(self, latents: torch.Tensor) -> torch.Tensor:
        """[b, n, latent size] -> float32 [b, samples]."""
        hidden = latents.transpose(1, 2)
        for part, condition in zip(self.model, self._conditions, strict=True):
            if condition is not None:
                hidden = condition(hidden, self._rate)
            hidden = part(hidden)
        return hidden[:, 0].float()


def decoder_context(config: Mapping[str, Any]) -> int:
    """Latents before one that its samples depend on."""
    residual = (_KERNEL - 1) * sum(_DILATIONS)
    span = _KERNEL - 1
    for stride in reversed(config["decoder_rates"]):
        # An upsampling sees one of its inputs more.
        span = math.ceil((span + residual) / stride) + 1
    return span + _KERNEL - 1


def folded(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights whose norms were apart (`weight_g`, `weight_v`), put together."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_v"):
            stem = name.removesuffix("_v")
            norm = tensor.float().flatten(1).norm(dim=1).view(-1, *[1] * (tensor.dim() - 1))
            made[stem] = tensor * (tensors[f"{stem}_g"] / norm)
        elif not name.endswith(".weight_g"):
            made[name] = tensor
    return made
