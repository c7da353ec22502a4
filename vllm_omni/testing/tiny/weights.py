# SPDX-License-Identifier: Apache-2.0
"""Random weights that behave like trained ones where tests look.

Default initializers (std 0.02) make a tiny network nearly linear: the residual stream is the token
embedding, greedy decoding repeats one token, and argmax margins are of the size of rounding. Here
every layer has unit gain, so hidden states depend on the whole context and logits spread over
several units.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.05


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator, gain: float = 1.0) -> None:
    """Redraw every parameter of ``module`` in place.

    Weights of two or more dimensions get std ``gain / sqrt(fan_in)``, embeddings std 1. Vectors
    called ``weight`` are norm scales and get ``1 + 0.1 n``; other vectors (biases, log-scales of
    snake activations) get ``0.05 n``.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    transposed = {id(m.weight) for m in module.modules() if isinstance(m, nn.ConvTranspose1d)}
    strides = {
        id(m.weight): m.stride[0] for m in module.modules() if isinstance(m, nn.ConvTranspose1d)
    }
    for name, param in module.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if id(param) in embeddings:
            param.copy_(noise)
        elif id(param) in transposed:
            fan_in = param.shape[0] * param.shape[2] / strides[id(param)]
            param.copy_(noise * (gain / math.sqrt(fan_in)))
        elif param.dim() >= 2:
            fan_in = param.shape[-1] if "experts" in name else math.prod(param.shape[1:])
            param.copy_(noise * (gain / math.sqrt(fan_in)))
        elif name.rsplit(".", 1)[-1] in ("weight", "gamma", "scale"):
            param.copy_(1 + NORM_SPREAD * noise)
        else:
            param.copy_(BIAS_SPREAD * noise)


@torch.no_grad()
def scale_(weights: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply each tensor by ``factor`` in place."""
    for weight in weights:
        weight.mul_(factor)


@torch.no_grad()
def shape_logits(
    head: nn.Linear, spread: float, stop: dict[int, float], silent: Iterable[int] = ()
) -> None:
    """Set the greedy behaviour of an output head, in place.

    ``spread`` multiplies all rows: the std of a logit when the input has unit RMS and the rows were
    drawn with std ``1 / sqrt(hidden)``. ``stop`` maps a token id to a further factor on its row: at
    about 1.5 to 2 such a token is the argmax once in some tens of steps, so generation ends by
    itself. ``silent`` ids get a zero row: against the maximum of hundreds of random logits they
    never win under greedy decoding.
    """
    head.weight.mul_(spread)
    for token, factor in stop.items():
        head.weight[token].mul_(factor)
    silent = list(silent)
    if silent:
        head.weight[silent] = 0.0
