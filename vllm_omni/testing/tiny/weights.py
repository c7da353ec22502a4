# SPDX-License-Identifier: Apache-2.0
"""Random weights that behave like trained ones where tests look.

Default initializers (std 0.02) make a tiny network nearly linear: the residual stream is the token
embedding, greedy decoding repeats one token, and argmax margins are of the size of rounding. Here
layers have unit gain and attention is sharp, so hidden states depend on the whole context, pictures
and sounds change the answer, and logits spread over several units.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

NORM_SPREAD = 0.1
BIAS_SPREAD = 0.05
GAINS = {
    "q_proj": 1.6,
    "k_proj": 1.6,
    "q_norm": 1.6,
    "k_norm": 1.6,
    "v_proj": 1.5,
    "o_proj": 1.5,
    "out_proj": 1.5,
    "qkv": 1.5,
    "gate": 2.0,
    # Code2wav's convolutions: snake activations amplify rounding where their input is large.
    "conv": 0.5,
    "conv1": 1.6,
    "conv2": 1.6,
    "conv2d1": 1.6,
    "conv2d2": 1.6,
    "conv2d3": 1.6,
    "proj": 1.5,
    "proj2": 2.0,
}


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw every parameter of ``module`` in place.

    Weights of two or more dimensions get std ``1 / sqrt(fan_in)``, embeddings std 1; ``GAINS``
    multiplies those whose module name it holds. Norm scales get ``1 + 0.1 n``, other vectors
    (biases, log-scales of snake activations) ``0.05 n``.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    strides = {
        id(m.weight): m.stride[0] for m in module.modules() if isinstance(m, nn.ConvTranspose1d)
    }
    for name, param in module.named_parameters():
        owner, _, kind = name.rpartition(".")
        gain = GAINS.get(owner.rpartition(".")[2], 1.0)
        noise = torch.randn(param.shape, generator=generator)
        if id(param) in embeddings:
            param.copy_(noise)
        elif id(param) in strides:
            fan_in = param.shape[0] * param.shape[2] / strides[id(param)]
            param.copy_(noise * (gain / math.sqrt(fan_in)))
        elif param.dim() >= 2:
            fan_in = param.shape[-1] if "experts" in name else math.prod(param.shape[1:])
            param.copy_(noise * (gain / math.sqrt(fan_in)))
        elif kind in ("weight", "gamma", "scale"):
            param.copy_(gain * (1 + NORM_SPREAD * noise))
        else:
            param.copy_(BIAS_SPREAD * noise)


@torch.no_grad()
def shape_logits(
    head: nn.Linear, spread: float, stop: dict[int, float], silent: Iterable[int] = ()
) -> None:
    """Set the greedy behaviour of an output head, in place.

    ``spread`` multiplies all rows: the std of a logit when the input has unit RMS and the rows were
    drawn with std ``1 / sqrt(hidden)``. ``stop`` maps a token id to a further factor on its row: at
    about 2 such a token is the argmax once in some tens of steps, so generation ends by itself.
    ``silent`` ids get a zero row: against the maximum of hundreds of random logits they never win
    under greedy decoding.
    """
    head.weight.mul_(spread)
    for token, factor in stop.items():
        head.weight[token].mul_(factor)
    silent = list(silent)
    if silent:
        head.weight[silent] = 0.0


@torch.no_grad()
def set_level(output: nn.Conv1d, decode: Callable[[], torch.Tensor], rms: float) -> None:
    """Scale a decoder's last convolution so that the waveform ``decode`` gives has this RMS."""
    unclipped = 1e-3
    for param in output.parameters():
        param.mul_(unclipped)
    level = float(decode().square().mean().sqrt())
    for param in output.parameters():
        param.mul_(rms / level)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A file as the hub has it."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """A file of weights."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
