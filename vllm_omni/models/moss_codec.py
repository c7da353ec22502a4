# SPDX-License-Identifier: Apache-2.0
"""MOSS-Audio-Tokenizer: causal transformers, a patch of positions becoming one (or one several)
between them, around a residual quantizer.

Reference: `modeling_moss_audio_tokenizer.py` of the published checkpoints; parameters have its
names. All attention looks back a fixed time, so a stream can go on exactly from what its layers
remember of their last positions (`Memory`), at the cost of its new frames alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from vllm_omni.config.hf.moss_tts import MossAudioTokenizerConfig

Memory = list[torch.Tensor]
"""Of a stream, one per transformer: [b, layers, 2, heads, span, head_dim], the keys and values of
the last positions before the next one; older ones come first."""


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A transformer of the codec.

    Attributes:
        inputs: Width of what it takes.
        outputs: Width of what it gives.
        width: Its own.
        heads: Of attention.
        layers: How many.
        inner: Width of its feed-forward networks.
        window: Positions that one attends to, itself included.
        period: Longest of the rotary embedding.
        layer_scale: Its residual branches are scaled by learned factors.
        rate: Its positions per frame.
    """

    inputs: int
    outputs: int
    width: int
    heads: int
    layers: int
    inner: int
    window: int
    period: float
    layer_scale: bool
    rate: int


Spec = TransformerSpec | int
"""A module: a transformer, or how many positions are patched together."""


def encoder_specs(config: MossAudioTokenizerConfig) -> list[Spec]:
    """Of the modules from samples to frames.

    Raises:
        ValueError: There is one that is not known.
    """
    modules = config.encoder_kwargs or []
    factor = config.downsample_rate
    specs: list[Spec] = []
    for module in modules:
        specs.append(_spec(config, module, factor))
        if isinstance(specs[-1], int):
            factor //= specs[-1]
    return specs


def decoder_specs(config: MossAudioTokenizerConfig) -> list[Spec]:
    """Of the modules from frames to samples.

    Raises:
        ValueError: There is one that is not known.
    """
    factor = 1
    specs: list[Spec] = []
    for module in config.decoder_kwargs or []:
        specs.append(_spec(config, module, factor))
        if isinstance(specs[-1], int):
            factor *= specs[-1]
    return specs


_KNOWN = {
    "causal": (True,),
    "norm": ("layer_norm",),
    "positional_embedding": ("rope",),
    "gating": ("none",),
}


def _spec(config: MossAudioTokenizerConfig, module: dict, rate: int) -> Spec:
    kind = module.get("module_type")
    if kind == "PatchedPretransform":
        return int(module["patch_size"])
    if kind != "Transformer":
        raise ValueError(f"module_type {kind!r}")
    for key, known in _KNOWN.items():
        if module.get(key, known[0]) not in known:
            raise ValueError(f"{key} {module[key]!r}")
    seconds = module.get("context_duration") or config.causal_transformer_context_duration
    return TransformerSpec(
        inputs=module["input_dimension"],
        outputs=module["output_dimension"],
        width=module["d_model"],
        heads=module["num_heads"],
        layers=module["num_layers"],
        inner=module["dim_feedforward"],
        window=int(config.sampling_rate * rate / config.downsample_rate * seconds),
        period=module.get("max_period", 10_000),
        layer_scale=module.get("layer_scale") is not None,
        rate=rate,
    )


class Attention(nn.Module):
    """Causal, over a window; keys and queries are rotated in pairs of neighbours."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        width = spec.width
        self.in_projs = nn.ModuleList([nn.Linear(width, 3 * width, bias=False)])
        self.out_projs = nn.ModuleList([nn.Linear(width, width, bias=False)])
        self._heads = spec.heads

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, n, width] -> the same, and keys and values [b, 2, heads, span + n, head_dim].

        Args:
            x: Normed inputs.
            turns: Complex [b, 1, n, head_dim / 2].
            mask: bool [b, 1, n, span + n].
            past: [b, 2, heads, span, head_dim].
        """
        batch, count, width = x.shape
        parts = self.in_projs[0](x).view(batch, count, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = _turned(parts[0], turns), _turned(parts[1], turns), parts[2]
        kept = torch.cat([past, torch.stack([key, value], dim=1)], dim=3)
        heard = functional.scaled_dot_product_attention(query, kept[:, 0], kept[:, 1], mask)
        return self.out_projs[0](heard.transpose(1, 2).reshape(batch, count, width)), kept


class LayerScale(nn.Module):
    """Learned factors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> the same."""
        return self.scale * x


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.norm1 = nn.LayerNorm(spec.width, eps=1e-5)
        self.norm2 = nn.LayerNorm(spec.width, eps=1e-5)
        self.linear1 = nn.Linear(spec.width, spec.inner, bias=False)
        self.linear2 = nn.Linear(spec.inner, spec.width, bias=False)
        scaled = spec.layer_scale
        self.layer_scale_1 = LayerScale(spec.width) if scaled else nn.Identity()
        self.layer_scale_2 = LayerScale(spec.width) if scaled else nn.Identity()

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Attention`."""
        heard, kept = self.self_attn(self.norm1(x), turns, mask, past)
        x = x + self.layer_scale_1(heard)
        made = self.linear2(functional.gelu(self.linear1(self.norm2(x))))
        return x + self.layer_scale_2(made), kept


class Stack(nn.Module):
    """The layers of a transformer."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))


class Transformer(nn.Module):
    """A transformer between projections.

    Args:
        spec: Its sizes.
        projects: It has projections even where widths are equal (input, output).
    """

    def __init__(self, spec: TransformerSpec, projects: tuple[bool, bool]) -> None:
        super().__init__()
        self.spec = spec
        into, out_of = projects
        into, out_of = into or spec.inputs != spec.width, out_of or spec.outputs != spec.width
        self.input_proj = nn.Linear(spec.inputs, spec.width, bias=False) if into else nn.Identity()
        self.transformer = Stack(spec)
        self.output_proj = (
            nn.Linear(spec.width, spec.outputs, bias=False) if out_of else nn.Identity()
        )

    def forward(
        self, x: torch.Tensor, past: torch.Tensor, seen: torch.Tensor, valid: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, n, inputs] -> [b, n, outputs], and the memory after the valid positions.

        Args:
            x: New positions, padding behind the valid ones.
            past: See `Memory`.
            seen: int64 [b], positions before the new ones.
            valid: int64 [b], how many of the new ones are no padding.
        """
        turns = _turns(self.spec, seen, x.shape[1])
        mask = _mask(self.spec, seen, x.shape[1], past.shape[4])
        x = self.input_proj(x)
        kept = []
        for index, layer in enumerate(self.transformer.layers):
            x, state = layer(x, turns, mask, past[:, index])
            kept.append(_tail(state, valid, past.shape[4]))
        return self.output_proj(x), torch.stack(kept, dim=1)

    def new_memory(self, device: torch.device) -> torch.Tensor:
        """Of a stream that begins, in float32."""
        spec = self.spec
        head = spec.width // spec.heads
        return torch.zeros(1, spec.layers, 2, spec.heads, spec.window - 1, head, device=device)


def _turns(spec: TransformerSpec, seen: torch.Tensor, count: int) -> torch.Tensor:
    """Rotations of the new positions, complex64 [b, 1, count, head_dim / 2]."""
    half = spec.width // spec.heads // 2
    exponents = torch.arange(half, device=seen.device, dtype=torch.float32)
    speeds = torch.exp(exponents * (-math.log(spec.period) / half))
    positions = seen[:, None] + torch.arange(count, device=seen.device)
    angles = positions[:, None, :, None].float() * speeds
    return torch.polar(torch.ones_like(angles), angles)


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[b, heads, n, head_dim], rotated."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _mask(spec: TransformerSpec, seen: torch.Tensor, count: int, span: int) -> torch.Tensor:
    """Which keys the new positions attend to, bool [b, 1, count, span + count]."""
    query = torch.arange(count, device=seen.device)[:, None]
    key = torch.arange(-span, count, device=seen.device)
    back = query - key
    near = (back >= 0) & (back < spec.window)
    return (near & (key >= -seen[:, None, None]))[:, None]


def _tail(state: torch.Tensor, valid: torch.Tensor, span: int) -> torch.Tensor:
    """The last `span` positions before the padding: [b, 2, heads, span + n, head_dim] ->
    [b, 2, heads, span, head_dim]."""
    index = valid[:, None] + torch.arange(span, device=valid.device)
    index = index[:, None, None, :, None].expand(-1, *state.shape[1:3], -1, state.shape[4])
    return state.gather(3, index)


class Modules(nn.ModuleList):
    """The encoder or the decoder, by the checkpoint's indices; patching has no parameters.

    Args:
        specs: Of all of its modules.
        names: Of the checkpoint's tensors, without its prefix.
    """

    def __init__(self, specs: Sequence[Spec], names: Sequence[str]) -> None:
        super().__init__(
            nn.Identity()
            if isinstance(spec, int)
            else Transformer(
                spec,
                (f"{index}.input_proj.weight" in names, f"{index}.output_proj.weight" in names),
            )
            for index, spec in enumerate(specs)
        )
        self.specs = list(specs)

    @property
    def transformers(self) -> list[Transformer]:
        """Those of its modules."""
        return [module for module in self if isinstance(module, Transformer)]


class Quantizer(nn.Module):
    """One codebook of the residual quantizer."""

    def __init__(self, width: int, size: int, dim: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = _conv(width, dim), _conv(dim, width)
        self.codebook = nn.Embedding(size, dim)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [b, n] -> [b, width, n]."""
        return self.out_proj(self.codebook(codes).transpose(1, 2))


class ResidualQuantizer(nn.Module):
    """What is left after one codebook is for the next one.

    Args:
        config: The codec's.

    Attributes:
        by_angle: The nearest code is that of the smallest angle (`rlfq`), not distance (`rvq`).
    """

    def __init__(self, config: MossAudioTokenizerConfig) -> None:
        super().__init__()
        sizes = config.quantizer_kwargs or {}
        kind = sizes.get("quantizer_type") or config.quantizer_type or "rvq"
        self.by_angle = kind in ("rlfq", "random_prefix_rlfq")
        inner = sizes.get("rvq_dim") or sizes["input_dim"]
        outer = sizes.get("output_dim") or sizes["input_dim"]
        self.input_proj, self.output_proj = _conv(sizes["input_dim"], inner), _conv(inner, outer)
        self.quantizers = nn.ModuleList(
            Quantizer(inner, sizes["codebook_size"], sizes["codebook_dim"])
            for _ in range(sizes["num_quantizers"])
        )

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [b, groups, n] -> [b, n, output_dim]; of the first groups, if there are fewer."""
        parts = [self.quantizers[g].decode(codes[:, g]) for g in range(codes.shape[1])]
        return self.output_proj(torch.stack(parts).sum(dim=0)).transpose(1, 2)

    def encode(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        """[b, n, input_dim] -> int64 [b, n, groups]."""
        left = self.input_proj(x.transpose(1, 2))
        codes = []
        for quantizer in self.quantizers[:groups]:
            near = self._nearest(quantizer.in_proj(left).transpose(1, 2), quantizer.codebook.weight)
            left = left - quantizer.decode(near)
            codes.append(near)
        return torch.stack(codes, dim=-1)

    def _nearest(self, points: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if self.by_angle:
            points, table = functional.normalize(points, dim=-1), functional.normalize(table)
        distance = points.square().sum(-1, keepdim=True) - 2 * points @ table.T
        return (distance + table.square().sum(-1)).argmin(dim=-1)


def _conv(inputs: int, outputs: int) -> nn.Module:
    if inputs == outputs:
        return nn.Identity()
    return parametrizations.weight_norm(nn.Conv1d(inputs, outputs, 1))


class MossDecoder(nn.Module):
    """Codes to a waveform.

    Args:
        config: The codec's.
        names: Of its tensors in the checkpoint.
    """

    def __init__(self, config: MossAudioTokenizerConfig, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.quantizer = ResidualQuantizer(config)
        self.decoder = Modules(decoder_specs(config), _under(names, "decoder."))

    def new_memory(self, device: torch.device) -> Memory:
        """Of a stream that begins."""
        return [module.new_memory(device) for module in self.decoder.transformers]

    def forward(
        self, codes: torch.Tensor, seen: torch.Tensor, valid: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        """Decode the next frames of b streams.

        Args:
            codes: int64 [b, groups, n], padding behind the valid frames.
            seen: int64 [b], frames before them.
            valid: int64 [b], how many are no padding.
            memory: After the frames before.

        Returns:
            Samples [b, n * downsample_rate], and the memory after the valid frames.
        """
        x = self.quantizer.decode(codes)
        past, kept = iter(memory), []
        for spec, module in zip(self.decoder.specs, self.decoder, strict=True):
            if isinstance(spec, int):
                # A position's values are of one new position after another, per channel.
                x = x.unflatten(2, (-1, spec)).transpose(2, 3).flatten(1, 2)
            else:
                x, state = module(x, next(past), seen * spec.rate, valid * spec.rate)
                kept.append(state)
        return x[..., 0], kept

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Whole streams of the same length in one go: [b, groups, n] -> [b, n * rate]."""
        if codes.shape[2] == 0:
            return codes.new_zeros(len(codes), 0, dtype=torch.float32)
        seen = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
        memory = [
            module.expand(len(codes), *[-1] * 5)[..., :0, :]
            for module in self.new_memory(codes.device)
        ]
        return self(codes, seen, seen + codes.shape[2], memory)[0]


class MossEncoder(nn.Module):
    """A waveform to codes.

    Args:
        config: The codec's.
        names: Of its tensors in the checkpoint.
    """

    def __init__(self, config: MossAudioTokenizerConfig, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.encoder = Modules(encoder_specs(config), _under(names, "encoder."))
        self.quantizer = ResidualQuantizer(config)

    def forward(self, samples: torch.Tensor, groups: int) -> torch.Tensor:
        """Samples [b, n] of whole frames -> int64 [b, frames, groups]."""
        x = samples[..., None]
        nothing = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for spec, module in zip(self.encoder.specs, self.encoder, strict=True):
            if isinstance(spec, int):
                x = x.unflatten(1, (-1, spec)).transpose(2, 3).flatten(2, 3)
            else:
                past = module.new_memory(x.device).expand(len(x), *[-1] * 5)[..., :0, :]
                x, _ = module(x, past, nothing, nothing)
        return self.quantizer.encode(x, groups)


def _under(names: Sequence[str], prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
