# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS's codec: transformers and convolutions in turn, over patches of samples.

Everything is causal: attention reaches a few positions back, the nearer the stronger (ALiBi), and
convolutions are padded on the left. A frame's first code is an entry of a codebook, each of the
others a level of one number (finite scalar quantization). Codes are without the special ones here.

Described by the published checkpoint and its implementation. Published checkpoints have no weights
of the encoder.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from vllm_omni.config.hf.voxtral_tts import VoxtralCodecConfig, numbers
from vllm_omni.models.voxtral_acoustic import FeedForward

_LEAST_USAGE = 1e-5


def alibi_slopes(heads: int) -> list[float]:
    """By how much a position's weight falls with its distance, of each head."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * i / count) for i in range(count)]

    power = 2 ** math.floor(math.log2(heads))
    return of_power(power) + of_power(2 * power)[::2][: heads - power]


class _Attention(nn.Module):
    """Causal attention over a window, with a bias by distance.

    Args:
        config: The codec's.
        window: Positions before itself that a position attends to.
    """

    def __init__(self, config: VoxtralCodecConfig, window: int) -> None:
        super().__init__()
        self._head_dim, self._window = config.head_dim, window
        self._slopes = alibi_slopes(config.n_heads)
        self._slopes_on: dict[torch.device, torch.Tensor] = {}
        queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, queries, bias=False)
        self.wk = nn.Linear(config.dim, keys, bias=False)
        self.wv = nn.Linear(config.dim, keys, bias=False)
        self.wo = nn.Linear(queries, config.dim, bias=config.use_biases)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(width, eps=config.qk_norm_eps) if config.qk_norm else nn.Identity()
            for width in (queries, keys)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[b, positions, dim] -> likewise."""
        query, key, value = (
            part.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for part in (
                self.q_norm(self.wq(inputs)),
                self.k_norm(self.wk(inputs)),
                self.wv(inputs),
            )
        )
        bias = self._bias(inputs.shape[1], inputs.device).to(query.dtype)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))

    def _bias(self, count: int, device: torch.device) -> torch.Tensor:
        """float32 [1, heads, count, count]; -inf where nothing is attended to."""
        if device not in self._slopes_on:
            slopes = torch.tensor(self._slopes, dtype=torch.float32, device=device)
            self._slopes_on[device] = slopes[:, None, None]
        positions = torch.arange(count, device=device)
        distance = positions - positions[:, None]
        outside = (distance > 0) | (distance < -self._window)
        return (self._slopes_on[device] * distance).masked_fill(outside, -math.inf)[None]


class _Layer(nn.Module):
    def __init__(self, config: VoxtralCodecConfig, window: int) -> None:
        super().__init__()
        self.attention = _Attention(config, window)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.use_biases)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self._scaled = config.layer_scale
        if config.layer_scale:
            self.attention_scale = nn.Parameter(torch.ones(config.dim))
            self.ffn_scale = nn.Parameter(torch.ones(config.dim))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(self.attention_norm(inputs))
        hidden = inputs + (self.attention_scale * mixed if self._scaled else mixed)
        made = self.feed_forward(self.ffn_norm(hidden))
        return hidden + (self.ffn_scale * made if self._scaled else made)


class _Transformer(nn.Module):
    def __init__(self, config: VoxtralCodecConfig, layers: int, window: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, window) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[b, positions, dim] -> likewise."""
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


class _CausalConv(nn.Module):
    """A convolution over [b, positions, width] that sees nothing after a position.

    Args:
        width: Of what it takes.
        out: Of what it makes.
        kernel: Positions that it sees.
        stride: Of them it makes one.
        padding: How the positions before the first are made up.
        normed: Its weights are kept as a direction and a length.
    """

    def __init__(
        self,
        width: int,
        out: int,
        kernel: int,
        stride: int = 1,
        padding: str = "replicate",
        normed: bool = True,
    ) -> None:
        super().__init__()
        conv = nn.Conv1d(width, out, kernel, stride=stride, bias=False)
        self.conv = weight_norm(conv) if normed else conv
        self._before, self._stride, self._padding = kernel - stride, stride, padding

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The last positions may not fill a stride."""
        after = -inputs.shape[1] % self._stride
        mapped = functional.pad(inputs.mT, (self._before, after), mode=self._padding)
        return self.conv(mapped).mT


class _CausalTransposedConv(nn.Module):
    """The other way: `stride` positions of each, [b, positions, width] -> likewise."""

    def __init__(self, width: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.ConvTranspose1d(width, width, kernel, stride=stride, bias=False))
        self._stride = stride

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.conv(inputs.mT)[..., : inputs.shape[1] * self._stride].mT


class _SemanticCodebook(nn.Module):
    """Entries are kept as sums over what was assigned to them."""

    def __init__(self, config: VoxtralCodecConfig) -> None:
        super().__init__()
        size, width = config.semantic_codebook_size, config.semantic_dim
        self.cluster_usage: torch.Tensor
        self.embedding_sum: torch.Tensor
        self.register_buffer("cluster_usage", torch.ones(size))
        self.register_buffer("embedding_sum", torch.randn(size, width))

    def entries(self) -> torch.Tensor:
        """[size, width]."""
        return self.embedding_sum / self.cluster_usage.clamp_min(_LEAST_USAGE)[:, None]


class _Quantizer(nn.Module):
    def __init__(self, config: VoxtralCodecConfig) -> None:
        super().__init__()
        self.semantic_codebook = _SemanticCodebook(config)
        self._top = config.acoustic_codebook_size - 1

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 [b, frames, groups] -> [b, frames, latent_dim]."""
        semantic = self.semantic_codebook.entries()[codes[..., 0]]
        acoustic = codes[..., 1:] * 2 / self._top - 1
        return torch.cat([semantic.to(dtype), acoustic.to(dtype)], dim=-1)

    def encode(self, latents: torch.Tensor) -> torch.Tensor:
        """[b, frames, latent_dim] -> int64 [b, frames, groups]."""
        entries = self.semantic_codebook.entries()
        semantic, acoustic = latents.tensor_split([entries.shape[1]], dim=-1)
        nearest = torch.cdist(semantic, entries[None]).argmin(dim=-1)
        levels = ((acoustic.tanh() + 1) / 2 * self._top).round().long()
        return torch.cat([nearest[..., None], levels], dim=-1)


class CodecDecoder(nn.Module):
    """Codes to a waveform."""

    def __init__(self, config: VoxtralCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = _Quantizer(config)
        self.decoder_blocks = nn.ModuleList(_decoder_blocks(config))
        self.output_proj = _CausalConv(
            config.dim,
            config.pretransform_patch_size,
            config.patch_proj_kernel_size,
            padding="reflect",
            normed=config.conv_weight_norm,
        )

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [b, frames, groups] -> float32 [b, samples]."""
        hidden = self.quantizer.decode(codes, self.dtype)
        for block in self.decoder_blocks:
            hidden = block(hidden)
        return self.output_proj(hidden).flatten(1).float()

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return next(self.parameters()).dtype


class CodecEncoder(nn.Module):
    """A waveform to codes."""

    def __init__(self, config: VoxtralCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = _Quantizer(config)
        self.input_proj = _CausalConv(
            config.pretransform_patch_size,
            config.dim,
            config.patch_proj_kernel_size,
            padding="reflect",
            normed=config.conv_weight_norm,
        )
        self.encoder_blocks = nn.ModuleList(_encoder_blocks(config))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [b, samples] -> int64 [b, frames, groups]; the last frame may lack samples."""
        size = self.config.pretransform_patch_size
        padded = functional.pad(samples, (0, -samples.shape[1] % size))
        hidden = self.input_proj(padded.unflatten(1, (-1, size)))
        for block in self.encoder_blocks:
            hidden = block(hidden)
        return self.quantizer.encode(hidden)


def _decoder_blocks(config: VoxtralCodecConfig) -> Iterator[nn.Module]:
    kernels, strides = numbers(config.decoder_convs_kernels_str), config.decoder_strides
    window = config.innermost_window
    yield _CausalConv(config.latent_dim, config.dim, kernels[0], strides[0])
    for index, layers in enumerate(numbers(config.decoder_transformer_lengths_str)):
        if index and (kernels[index], strides[index]) != (1, 1):
            yield _CausalTransposedConv(config.dim, kernels[index], strides[index])
            if config.half_attn_window_upon_downsampling:
                window *= strides[index]
        yield _Transformer(config, layers, window)


def _encoder_blocks(config: VoxtralCodecConfig) -> Iterator[nn.Module]:
    kernels, strides = numbers(config.encoder_convs_kernels_str), config.encoder_strides
    window = config.attn_sliding_window_size
    last = len(kernels) - 1
    for index, layers in enumerate(numbers(config.encoder_transformer_lengths_str)):
        yield _Transformer(config, layers, window)
        if index == last or (kernels[index], strides[index]) != (1, 1):
            width = config.latent_dim if index == last else config.dim
            yield _CausalConv(config.dim, width, kernels[index], strides[index])
        if config.half_attn_window_upon_downsampling:
            window //= strides[index]


def decoder_context(config: VoxtralCodecConfig) -> int:
    """Frames before a frame that its samples depend on."""
    kernels, strides = numbers(config.decoder_convs_kernels_str), config.decoder_strides
    lengths = numbers(config.decoder_transformer_lengths_str)
    window = config.innermost_window
    halves = config.half_attn_window_upon_downsampling
    windows = [window * (math.prod(strides[: i + 1]) if halves else 1) for i in range(len(strides))]
    span = config.patch_proj_kernel_size - 1
    for index in reversed(range(len(strides))):
        span += lengths[index] * windows[index]
        if index:
            more = math.ceil(kernels[index] / strides[index]) - 1
            span = math.ceil(span / strides[index]) + more
    return span + kernels[0] - 1


def fuse_weight_norms(module: nn.Module) -> None:
    """Keep weights as they are used, once the checkpoint's are loaded."""
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.ConvTranspose1d) and parametrize.is_parametrized(part):
            parametrize.remove_parametrizations(part, "weight")
