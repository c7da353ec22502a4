# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's 12.5 Hz codec, put together from transformers' Mimi and Qwen3-Omni parts.

Names of parameters are those of the published `speech_tokenizer/model.safetensors`; what the parts
do is described in the technical report (arXiv 2601.15621) and by the authors' package.
"""

import torch
from torch import nn
from transformers import MimiConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCausalTransConvNet,
    Qwen3OmniMoeCode2WavDecoderBlock,
    Qwen3OmniMoeCode2WavTransformerModel,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

from vllm_omni.config.hf.qwen3_tts_codec import Qwen3TTSCodecConfig, Qwen3TTSCodecDecoderConfig
from vllm_omni.models.mimi import MimiEncoding

_USAGE_FLOOR = 1e-5
"""Least usage that a codebook entry is taken to have had."""
_SEMANTIC_GROUPS = 1
"""First codes of a frame, with a quantizer of their own."""


class Codebook(nn.Module):
    """Entries as training left them: the sum of what was assigned to each, and how often."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(size))
        self.embedding_sum = nn.Parameter(torch.zeros(size, dim))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, frames] -> [batch, frames, dim]."""
        usage = self.cluster_usage[codes].clamp(min=_USAGE_FLOOR)
        return self.embedding_sum[codes] / usage[..., None]


class CodebookLayer(nn.Module):
    """One codebook of a residual quantizer."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, dim)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """See `Codebook`."""
        return self._codebook(codes)


class CodebookStack(nn.Module):
    """Codebooks whose entries add up."""

    def __init__(self, groups: int, size: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([CodebookLayer(size, dim) for _ in range(groups)])

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, frames, dim]."""
        return sum(layer(codes[:, group]) for group, layer in enumerate(self.layers))


class ResidualDequantizer(nn.Module):
    """Codes to vectors. (`input_proj` belongs to quantizing; checkpoints have it.)"""

    def __init__(self, groups: int, size: int, dim: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(dim, dim // 2, 1, bias=False)
        self.output_proj = nn.Conv1d(dim // 2, dim, 1, bias=False)
        self.vq = CodebookStack(groups, size, dim // 2)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, dim, frames]."""
        return self.output_proj(self.vq(codes).transpose(1, 2))


class SplitDequantizer(nn.Module):
    """A dequantizer for the first code of a frame and one for the others."""

    def __init__(self, config: Qwen3TTSCodecDecoderConfig) -> None:
        super().__init__()
        size, dim = config.codebook_size, config.codebook_dim
        self.rvq_first = ResidualDequantizer(_SEMANTIC_GROUPS, size, dim)
        self.rvq_rest = ResidualDequantizer(config.num_quantizers - _SEMANTIC_GROUPS, size, dim)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, codebook_dim, frames]."""
        return self.rvq_first(codes[:, :_SEMANTIC_GROUPS]) + self.rvq_rest(
            codes[:, _SEMANTIC_GROUPS:]
        )


class LatentTransformer(Qwen3OmniMoeCode2WavTransformerModel):
    """Qwen3-Omni's transformer over frames between two projections."""

    def __init__(self, config: Qwen3TTSCodecDecoderConfig) -> None:
        super().__init__(config)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def transform(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, frames, latent_dim] -> the same."""
        return self.output_proj(self(inputs_embeds=self.input_proj(latents)).last_hidden_state)


class CodecDecoder(nn.Module):
    """`decoder.*` of the codec. Causal: `decode_upsample_rate` samples per frame, exactly."""

    def __init__(self, config: Qwen3TTSCodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.quantizer = SplitDequantizer(config)
        self.pre_conv = Qwen3OmniMoeCausalConvNet(config.codebook_dim, config.latent_dim, 3)
        self.pre_transformer = LatentTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList(
                [
                    Qwen3OmniMoeCausalTransConvNet(
                        config.latent_dim, config.latent_dim, ratio, ratio
                    ),
                    Qwen3OmniMoeConvNeXtBlock(config.latent_dim),
                ]
            )
            for ratio in config.upsampling_ratios
        )
        stages = len(config.upsample_rates)
        width = config.decoder_dim // 2**stages
        self.decoder = nn.ModuleList(
            [
                Qwen3OmniMoeCausalConvNet(config.latent_dim, config.decoder_dim, 7),
                *(_decoder_block(config, index) for index in range(stages)),
                Qwen3OmniMoeSnakeBeta(width),
                Qwen3OmniMoeCausalConvNet(width, 1, 7),
            ]
        )

    def latents(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> [batch, frames, latent_dim]."""
        hidden = self.pre_conv(self.quantizer(codes))
        return self.pre_transformer.transform(hidden.transpose(1, 2))

    def samples(self, latents: torch.Tensor) -> torch.Tensor:
        """[batch, frames, latent_dim] -> float32 [batch, samples] in [-1, 1]."""
        hidden = latents.transpose(1, 2)
        for blocks in self.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1).squeeze(1).float()

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64 [batch, groups, frames] -> float32 [batch, samples] in [-1, 1]."""
        return self.samples(self.latents(codes))


def _decoder_block(
    config: Qwen3TTSCodecDecoderConfig, index: int
) -> Qwen3OmniMoeCode2WavDecoderBlock:
    """Qwen3-Omni's block, but the transposed convolution is trimmed at its end only."""
    block = Qwen3OmniMoeCode2WavDecoderBlock(config, index)
    block.block[1].left_pad = 0
    return block


class CodecEncoder(MimiEncoding):
    """`encoder.*` of the codec: Mimi without what decodes."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__(config)
        del self.upsample, self.decoder_transformer, self.decoder


class Codec(nn.Module):
    """The whole codec, as `speech_tokenizer/model.safetensors` has it."""

    def __init__(self, config: Qwen3TTSCodecConfig) -> None:
        super().__init__()
        self.encoder = CodecEncoder(config.encoder_config)
        self.decoder = CodecDecoder(config.decoder_config)
