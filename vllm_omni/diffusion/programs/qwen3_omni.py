# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's codec decoder: codes to a waveform.

Reference: transformers' `Qwen3OmniMoeCode2Wav` on the whole sequence. (Its `chunked_decode`, which
`generate` uses, loses `trimmed_samples` at every 300th frame and has 25 frames of context; ours
does neither.)

The model is a causal transformer over frames followed by causal convolutions. They are two
components here (see `causal`). Both ignore what follows, so calls of different length run together,
padded at the end.
"""

import math

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.causal import CausalCodec, CausalDecoding
from vllm_omni.diffusion.programs.streams import decode_stream
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, load_module

SAMPLE_RATE = 24000
"""Hz."""
_RESIDUAL_SPAN = 6 * (1 + 3 + 9)
"""Samples before the current one that the three residual units of a decoder block see."""
_KERNEL_SPAN = 6
"""Likewise for a causal convolution of kernel size 7."""


def samples_per_frame(config: Qwen3OmniMoeCode2WavConfig) -> int:
    """Waveform samples per codec frame."""
    return math.prod(config.upsample_rates) * math.prod(config.upsampling_ratios)


def trimmed_samples(config: Qwen3OmniMoeCode2WavConfig) -> int:
    """Samples missing at the end of n frames: a decode gives n * samples_per_frame - this.

    A transposed convolution of the decoder (kernel twice the stride) trims one stride at its end.
    """
    trimmed = 0
    for rate in config.upsample_rates:
        trimmed = (trimmed + 1) * rate
    return trimmed


def attention_context(config: Qwen3OmniMoeCode2WavConfig) -> int:
    """Frames before a frame that its hidden state depends on, through all layers."""
    return (config.sliding_window - 1) * config.num_hidden_layers


def convolution_context(config: Qwen3OmniMoeCode2WavConfig) -> int:
    """Frames before a frame whose hidden states its samples depend on."""
    span = _KERNEL_SPAN
    for rate in reversed(config.upsample_rates):
        span = math.ceil((span + _RESIDUAL_SPAN) / rate)
    span += _KERNEL_SPAN
    for ratio in reversed(config.upsampling_ratios):
        span = math.ceil((span + _KERNEL_SPAN) / ratio)
    return span


class FrameEncoder(nn.Module):
    """Codes to hidden states: the first half of `Qwen3OmniMoeCode2Wav.forward`."""

    def __init__(self, code2wav: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        self.code_embedding = code2wav.code_embedding
        self.pre_transformer = code2wav.pre_transformer
        self.code_offset = nn.Buffer(code2wav.code_offset, persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, frames, hidden_size]."""
        embeddings = self.code_embedding(codes + self.code_offset).mean(1)
        return self.pre_transformer(inputs_embeds=embeddings).last_hidden_state


class FrameDecoder(nn.Module):
    """Hidden states to samples: the second half of `Qwen3OmniMoeCode2Wav.forward`."""

    def __init__(self, code2wav: Qwen3OmniMoeCode2Wav) -> None:
        super().__init__()
        self.upsample = code2wav.upsample
        self.decoder = code2wav.decoder

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, frames, hidden_size] -> float32 [batch, samples]."""
        hidden = hidden.transpose(1, 2)
        for blocks in self.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1).squeeze(1).float()


def components(code2wav: Qwen3OmniMoeCode2Wav) -> Loaded:
    """The model as the program uses it."""
    config = code2wav.config
    rate, trimmed = samples_per_frame(config), trimmed_samples(config)
    width, dtype = config.hidden_size, next(code2wav.parameters()).dtype
    groups = config.num_quantizers
    encoder_rules = CallRules(
        {"codes": Ragged(-1)},
        RaggedOutput(lambda frames: frames, dim=1),
        graphs=Graphs(lambda rows, n: (torch.zeros(rows, groups, n, dtype=torch.int64),)),
    )
    decoder_rules = CallRules(
        {"hidden": Ragged(1)},
        RaggedOutput(lambda frames: frames * rate - trimmed),
        graphs=Graphs(lambda rows, n: (torch.zeros(rows, n, width, dtype=dtype),)),
        to_host=True,
    )
    return Loaded(
        {
            "encoder": Component(FrameEncoder(code2wav), {"forward": encoder_rules}),
            "decoder": Component(FrameDecoder(code2wav), {"forward": decoder_rules}),
        },
        {"config": config},
    )


def load(ctx: LoadContext) -> Loaded:
    """Load `code2wav.*` of a Qwen3-Omni checkpoint."""
    config = checkpoint_config(ctx).code2wav_config
    code2wav = load_module(ctx, Qwen3OmniMoeCode2Wav, config, "code2wav.", ctx.dtype)
    return components(code2wav)


def run(ctx: Program) -> None:
    """Decode windows of `codes` (int [frames, groups]); emits `audio` (float32 [samples])."""
    config: Qwen3OmniMoeCode2WavConfig = ctx.assets["config"]
    codec = CausalCodec(
        config.num_quantizers,
        config.codebook_size,
        samples_per_frame(config),
        attention_context(config),
        convolution_context(config),
    )
    encoder = ctx.component("encoder", FrameEncoder)
    decoder = ctx.component("decoder", FrameDecoder)
    decode_stream(ctx, CausalDecoding(codec, encoder, decoder, ctx.device), SAMPLE_RATE)
