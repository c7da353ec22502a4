# SPDX-License-Identifier: Apache-2.0
"""Random weights under which prompts, images and steps all matter.

Library initializers (std 0.02, zeroed gates) make a tiny network nearly deaf to its text encoder.
Here layers have unit gain, so that a change of any input is seen in the output, yet no value grows
from layer to layer.
"""

import math

import torch
from torch import nn

GAINS = {
    "attn2.to_out": 4.0,
    "context_embedder": 3.0,
    "self_attn.o_proj": 3.0,
    "lm_head": 4.0,
}
"""Factors on the weights of modules whose name holds the key: where a short prompt is one small
term in a U-Net's residual stream, or a few tokens among hundreds of template and padding."""

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.05


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw every parameter in place.

    Weights get std ``1 / sqrt(fan_in)``, embeddings and free-standing rows std 1, scales of norms
    ``1 + 0.1 n``, other vectors ``0.05 n``; single numbers stay near where they start.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    transposed = {
        id(m.weight): math.prod(m.stride)
        for m in module.modules()
        if isinstance(m, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    }
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        kind = name.rpartition(".")[2]
        if id(parameter) in tables or _is_row(parameter):
            parameter.copy_(noise)
        elif id(parameter) in transposed:
            fan_in = parameter.shape[0] * math.prod(parameter.shape[2:]) / transposed[id(parameter)]
            parameter.copy_(noise / math.sqrt(fan_in))
        elif parameter.ndim >= 2 and max(parameter.shape) < parameter.numel():
            fan_in = math.prod(parameter.shape[1:])
            gain = next((factor for key, factor in GAINS.items() if key in name), 1.0)
            parameter.copy_(noise * (gain / math.sqrt(fan_in)))
        elif parameter.numel() == 1:
            parameter.mul_(1 + NORM_SPREAD * noise).add_(BIAS_SPREAD)
        elif kind in ("weight", "gamma", "scale", "weight_g", "original0"):
            parameter.copy_(1 + NORM_SPREAD * noise)
        else:
            parameter.copy_(BIAS_SPREAD * noise)


def _is_row(parameter: nn.Parameter) -> bool:
    """A token of its own, as [1, 1, width]."""
    return parameter.ndim == 3 and parameter.shape[-1] == parameter.numel()


@torch.no_grad()
def steady_norms(model: nn.Module) -> None:
    """Keep the norms over the few channels of a tiny VAE from blowing rounding up a thousandfold.

    They do where all channels are near zero, as in a megapixel some are: large biases prevent it.
    """
    for name, module in model.named_modules():
        inner = "quant" not in name and "conv_out" not in name
        if inner and isinstance(module, nn.Conv2d | nn.Conv3d) and module.bias is not None:
            module.bias[0::2], module.bias[1::2] = 0.7, -0.7
