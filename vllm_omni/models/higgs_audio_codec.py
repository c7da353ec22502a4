# SPDX-License-Identifier: Apache-2.0
"""The codec of Higgs-Audio v2 (and v3): DAC's encoder and decoder, with HuBERT's features beside.

Reference: transformers' `HiggsAudioV2TokenizerModel`, which needs torchaudio (for one resampling);
tensor names are its. What training alone uses (the semantic decoder) is left out.
"""

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModel, HiggsAudioV2TokenizerConfig
from transformers.models.dac.modeling_dac import DacDecoder, DacEncoder

from vllm_omni.models import dac

SEMANTIC_PAD = 160
"""Samples of silence put around a recording for the semantic model."""
_ZERO_CROSSINGS = 6
_ROLLOFF = 0.99


class Codebook(nn.Module):
    """Nearest neighbours in a table, by Euclidean distance."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.embed: torch.Tensor
        self.register_buffer("embed", torch.zeros(config.codebook_size, config.codebook_dim))

    def nearest(self, points: torch.Tensor) -> torch.Tensor:
        """[..., width] -> int64 [...]."""
        table = self.embed.t()
        squares = points.pow(2).sum(-1, keepdim=True)
        distance = squares - 2 * points @ table + table.pow(2).sum(0, keepdim=True)
        return distance.argmin(dim=-1)


class Quantizer(nn.Module):
    """One stage of the residual quantizer."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.codebook = Codebook(config)
        self.project_in = nn.Linear(config.hidden_size, config.codebook_dim)
        self.project_out = nn.Linear(config.codebook_dim, config.hidden_size)

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """[b, n, hidden_size] -> int64 [b, n]."""
        return self.codebook.nearest(self.project_in(frames))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [b, n] -> [b, n, hidden_size]."""
        return self.project_out(functional.embedding(codes, self.codebook.embed))


class ResidualQuantizer(nn.Module):
    """Each stage codes what the ones before it left."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(Quantizer(config) for _ in range(config.num_quantizers))

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        """[b, n, hidden_size] -> int64 [b, groups, n]."""
        codes = []
        for quantizer in self.quantizers:
            code = quantizer.encode(frames)
            frames = frames - quantizer.decode(code)
            codes.append(code)
        return torch.stack(codes, dim=1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [b, groups, n] -> [b, n, hidden_size]."""
        parts = (q.decode(codes[:, k]) for k, q in enumerate(self.quantizers))
        return torch.stack(list(parts)).sum(dim=0)


class ResidualUnit(nn.Module):
    """A dilated convolution beside the identity."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig, width: int, dilation: int) -> None:
        super().__init__()
        kernel = config.unit_kernel_size
        padding = (kernel - 1) // 2 * dilation
        self.activation = nn.ELU()
        self.conv1 = nn.Conv1d(width, width, kernel, padding=padding, dilation=dilation, bias=False)
        self.conv2 = nn.Conv1d(width, width, 1, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, width, n] -> the same."""
        return hidden + self.conv2(self.activation(self.conv1(self.activation(hidden))))


class SemanticBlock(nn.Module):
    """Residual units, then a convolution that may go to a lower rate."""

    def __init__(
        self, config: HiggsAudioV2TokenizerConfig, width: int, out: int, stride: int
    ) -> None:
        super().__init__()
        self.res_units = nn.ModuleList(
            ResidualUnit(config, width, dilation) for dilation in config.block_dilations
        )
        kernel = 3 if stride == 1 else 2 * stride
        self.conv = nn.Conv1d(width, out, kernel, stride=stride, padding=(kernel - 1) // 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, width, n] -> [b, out, n / stride]."""
        for unit in self.res_units:
            hidden = unit(hidden)
        return self.conv(hidden)


class SemanticEncoder(nn.Module):
    """What the quantizer is given of the semantic features."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        width, kernel = config.semantic_hidden_size, config.kernel_size
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, bias=False)
        widths = [width, *(int(width * ratio) for ratio in config.channel_ratios)]
        self.conv_blocks = nn.ModuleList(
            SemanticBlock(config, *sizes)
            for sizes in zip(widths[:-1], widths[1:], config.strides, strict=True)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, width, n] -> [b, out, n / strides]."""
        hidden = self.conv(hidden)
        for block in self.conv_blocks:
            hidden = block(hidden)
        return hidden


class CodecDecoder(nn.Module):
    """Codes to a waveform; what a frame sounds like depends on frames before and after it."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = ResidualQuantizer(config)
        self.fc2 = nn.Linear(config.hidden_size, config.acoustic_model_config.hidden_size)
        self.acoustic_decoder = DacDecoder(config.acoustic_model_config)
        self.acoustic_decoder.tanh = nn.Identity()
        for block in self.acoustic_decoder.block:
            # A whole number of samples per frame also where a stride is odd.
            block.conv_t1.output_padding = (block.conv_t1.stride[0] % 2,)

    def forward(self, codes: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [b, groups, frames], of which `lengths` (int64 [b]) are valid (None: all) ->
        [b, samples], each sound followed by any numbers."""
        frames = self.fc2(self.quantizer.decode(codes)).transpose(1, 2)
        if lengths is None:
            return self.acoustic_decoder(frames)[:, 0]
        return dac.decode(self.acoustic_decoder, frames, lengths)


class CodecEncoder(nn.Module):
    """A recording to codes."""

    def __init__(self, config: HiggsAudioV2TokenizerConfig) -> None:
        super().__init__()
        self.config = config
        self.acoustic_encoder = DacEncoder(config.acoustic_model_config)
        self.semantic_model = AutoModel.from_config(config.semantic_model_config)
        self.encoder_semantic = SemanticEncoder(config)
        self.fc = nn.Linear(config.hidden_size, config.hidden_size)
        self.quantizer = ResidualQuantizer(config)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [b, samples] at `sample_rate` -> int64 [b, groups, frames]."""
        semantic = self.encoder_semantic(self._semantic_features(samples).transpose(1, 2))
        acoustic = self.acoustic_encoder(samples[:, None])
        if acoustic.shape[2] != semantic.shape[2]:
            margin = self.config.hop_length // 2
            acoustic = self.acoustic_encoder(functional.pad(samples[:, None], (margin, margin)))
        frames = torch.cat([acoustic, semantic], dim=1).transpose(1, 2)
        return self.quantizer.encode(self.fc(frames))

    def _semantic_features(self, samples: torch.Tensor) -> torch.Tensor:
        """[b, samples] -> [b, n, width]: the mean of all layers' states."""
        config = self.config
        heard = resampled(samples, config.sample_rate, config.semantic_sample_rate)
        heard = functional.pad(heard, (SEMANTIC_PAD, SEMANTIC_PAD))
        states = self.semantic_model(heard, output_hidden_states=True).hidden_states
        return torch.stack(states, dim=1).mean(dim=1)[:, :: config.semantic_downsample_factor]


def resampled(samples: torch.Tensor, rate: int, target: int) -> torch.Tensor:
    """Samples [b, n] at another rate, [b, ceil(n * target / rate)].

    By a sinc of six zero crossings under a Hann window, cut off at 99 % of the lower rate: what the
    codec was trained with, to rounding, because codes are to be the same.
    """
    if rate == target:
        return samples
    common = math.gcd(rate, target)
    old, new = rate // common, target // common
    cutoff = min(old, new) * _ROLLOFF
    width = math.ceil(_ZERO_CROSSINGS * old / cutoff)
    taps = torch.arange(-width, width + old, dtype=torch.float64) / old
    phases = torch.arange(new, dtype=torch.float64)[:, None] / new
    time = ((taps - phases) * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(time * math.pi / _ZERO_CROSSINGS / 2).square()
    kernels = (torch.sinc(time) * window * (cutoff / old)).to(samples)
    padded = functional.pad(samples[:, None], (width, width + old))
    made = functional.conv1d(padded, kernels[:, None], stride=old)
    length = math.ceil(samples.shape[1] * target / rate)
    return made.transpose(1, 2).reshape(len(samples), -1)[:, :length]
