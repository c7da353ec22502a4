# SPDX-License-Identifier: Apache-2.0
"""MOSS-Audio-Tokenizer by the code of its published checkpoints, written down plainly: one sound,
all of it at once, every position against every other one."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

Weights = dict[str, torch.Tensor]


class PlainMossCodec:
    """Codes of sounds, and sounds of codes."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = load_file(folder / "model.safetensors")

    @torch.inference_mode()
    def encode(self, samples: torch.Tensor, groups: int) -> torch.Tensor:
        """float32 [n] -> int64 [frames, groups]; made louder or softer as the processor does."""
        level = 10 * math.log10(float((samples**2).mean()) + 1e-9)
        samples = samples * 10 ** (max(-3.0, min(3.0, -20 - level)) / 20)
        hop, rate = self._config["downsample_rate"], float(self._config["sampling_rate"])
        x = samples[: len(samples) // hop * hop][None]  # [channels, positions]
        for index, module in enumerate(self._config["encoder_kwargs"]):
            if patch := module.get("patch_size"):
                channels, count = x.shape
                x = x.reshape(channels, count // patch, patch).permute(0, 2, 1)
                x = x.reshape(channels * patch, count // patch)
                rate /= patch
            else:
                x = self._transformer(f"encoder.{index}.", module, x, rate)
        left = self._conv("quantizer.input_proj", x)
        codes = []
        for group in range(groups):
            name = f"quantizer.quantizers.{group}."
            points = functional.normalize(self._conv(name + "in_proj", left).T)
            table = functional.normalize(self._weights[name + "codebook.weight"])
            nearest = torch.cdist(points, table).argmin(dim=1)
            left = left - self._decoded(group, nearest)
            codes.append(nearest)
        return torch.stack(codes, dim=1)

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [frames, groups] -> float32 [samples]."""
        x = sum(self._decoded(group, codes[:, group]) for group in range(codes.shape[1]))
        x = self._conv("quantizer.output_proj", x)
        rate = self._config["sampling_rate"] / self._config["downsample_rate"]
        for index, module in enumerate(self._config["decoder_kwargs"]):
            if patch := module.get("patch_size"):
                channels, count = x.shape
                x = x.reshape(channels // patch, patch, count).permute(0, 2, 1)
                x = x.reshape(channels // patch, count * patch)
                rate *= patch
            else:
                x = self._transformer(f"decoder.{index}.", module, x, rate)
        return x[0]

    def _decoded(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        name = f"quantizer.quantizers.{group}."
        return self._conv(name + "out_proj", self._weights[name + "codebook.weight"][codes].T)

    def _conv(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A weight-normed convolution of one position; none where widths are equal."""
        norm = name + ".parametrizations.weight.original"
        if norm + "0" not in self._weights:
            return x
        scale, direction = self._weights[norm + "0"][..., 0], self._weights[norm + "1"][..., 0]
        weight = scale * direction / direction.norm(dim=1, keepdim=True)
        return weight @ x + self._weights[name + ".bias"][:, None]

    def _transformer(self, name: str, module: dict, x: torch.Tensor, rate: float) -> torch.Tensor:
        window = int(rate * self._config["causal_transformer_context_duration"])
        x = self._linear(name + "input_proj", x.T)
        for layer in range(module["num_layers"]):
            part = f"{name}transformer.layers.{layer}."
            heard = self._attention(part, module, self._norm(part + "norm1", x), window)
            x = x + self._weights[part + "layer_scale_1.scale"] * heard
            made = functional.gelu(self._linear(part + "linear1", self._norm(part + "norm2", x)))
            x = x + self._weights[part + "layer_scale_2.scale"] * self._linear(
                part + "linear2", made
            )
        return self._linear(name + "output_proj", x).T

    def _attention(self, name: str, module: dict, x: torch.Tensor, window: int) -> torch.Tensor:
        count, width = x.shape
        heads, head = module["num_heads"], width // module["num_heads"]
        parts = self._linear(name + "self_attn.in_projs.0", x).reshape(count, 3, heads, head)
        query = self._rotated(parts[:, 0], module["max_period"])
        key = self._rotated(parts[:, 1], module["max_period"])
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(head)
        back = torch.arange(count)[:, None] - torch.arange(count)
        scores[:, (back < 0) | (back >= window)] = float("-inf")
        heard = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), parts[:, 2])
        return self._linear(name + "self_attn.out_projs.0", heard.reshape(count, width))

    @staticmethod
    def _rotated(x: torch.Tensor, period: float) -> torch.Tensor:
        """Neighbouring numbers are the parts of a complex one."""
        count, _, head = x.shape
        speeds = torch.exp(torch.arange(head // 2) * (-math.log(period) * 2 / head))
        angles = torch.arange(count)[:, None, None] * speeds
        real, imaginary = x[..., 0::2], x[..., 1::2]
        turned = (
            real * angles.cos() - imaginary * angles.sin(),
            real * angles.sin() + imaginary * angles.cos(),
        )
        return torch.stack(turned, dim=-1).flatten(-2)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[name + ".weight"], self._weights[name + ".bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-5)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights.get(name + ".weight")
        return x if weight is None else x @ weight.T
