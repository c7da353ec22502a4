# SPDX-License-Identifier: Apache-2.0
"""Mimi: codes to a waveform, and recordings to codes.

Reference: transformers' `MimiModel`. Its transformers run at twice the rate of frames (or what else
the convolution before the quantizer makes of it); here the vectors of a frame stay together.

Decoding is causal (see `causal`), with exactly `frame_size` samples per frame. What was said before
a request is no part of its sound's context: the reference decodes each turn by itself. Encoding
runs in one call per recording.
"""

import math

import torch
from transformers import CsmConfig, MimiConfig

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.causal import CausalCodec, CausalDecoding
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_stream
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, load_module
from vllm_omni.errors import OmniConfigError
from vllm_omni.models.mimi import MimiCodec, MimiEncoding, keep_sizes_on_host

_UPSAMPLE_SPAN = 1
"""Frames before the current one that the transposed convolution before the transformer sees."""


def vectors_per_frame(config: MimiConfig) -> int:
    """Of the transformers."""
    return config.frame_size // math.prod(config.upsampling_ratios)


def attention_context(config: MimiConfig) -> int:
    """Frames before a frame that its vectors depend on, through all layers."""
    span = (config.sliding_window - 1) * config.num_hidden_layers
    return math.ceil(span / vectors_per_frame(config)) + _UPSAMPLE_SPAN


def convolution_context(config: MimiConfig) -> int:
    """Frames before a frame whose vectors its samples depend on."""
    dilations = (config.dilation_growth_rate**layer for layer in range(config.num_residual_layers))
    residual = (config.residual_kernel_size - 1) * sum(dilations)
    span = config.last_kernel_size - 1
    for ratio in reversed(config.upsampling_ratios):
        # A transposed convolution of twice the stride sees one of its inputs more.
        span = math.ceil((span + residual) / ratio) + 1
    return math.ceil((span + config.kernel_size - 1) / vectors_per_frame(config))


def causal_codec(config: MimiConfig) -> CausalCodec:
    """What the decoding of a stream has to know."""
    return CausalCodec(
        config.num_quantizers,
        config.codebook_size,
        config.frame_size,
        attention_context(config),
        convolution_context(config),
    )


def components(codec: MimiCodec) -> Loaded:
    """The model as the program uses it."""
    config = codec.config
    size, groups, dtype = config.frame_size, config.num_quantizers, codec.dtype
    same = RaggedOutput(lambda frames: frames, dim=1)
    width = config.hidden_size * vectors_per_frame(config)
    codes = Graphs(lambda rows, n: (torch.zeros(rows, groups, n, dtype=torch.int64),))
    latents = Graphs(lambda rows, n: (torch.zeros(rows, n, width, dtype=dtype),))
    rules = {
        "latents": CallRules({"codes": Ragged(-1)}, same, graphs=codes),
        "samples": CallRules(
            {"latents": Ragged(1)},
            RaggedOutput(lambda frames: frames * size),
            graphs=latents,
            to_host=True,
        ),
        "frames": CallRules(),
        "whole_frames": CallRules(
            {"samples": Ragged(-1)}, RaggedOutput(lambda samples: samples // size, dim=1)
        ),
    }
    return Loaded({"codec": Component(codec, rules)}, {"config": config})


def encoded_frames(
    encoder: MimiEncoding, samples: torch.Tensor, hop: int, groups: int
) -> torch.Tensor:
    """Codes of a recording.

    Recordings of whole frames are padded at the end to run together; others run with those of their
    own length, as Mimi pads what it makes of the last, incomplete frame in a way of its own.

    Args:
        encoder: Its calls may be the engine's.
        samples: float32 [1, n].
        hop: Samples per frame.
        groups: Codes per frame.

    Returns:
        int32 [frames, groups], on the CPU.
    """
    encode = encoder.frames if samples.shape[1] % hop else encoder.whole_frames
    return encode(samples, groups=groups)[0].cpu()


def load_csm(ctx: LoadContext) -> Loaded:
    """Load `codec_model.*` of a CSM checkpoint.

    Raises:
        OmniConfigError: The checkpoint has another codec.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, CsmConfig) or not isinstance(whole.codec_config, MimiConfig):
        raise OmniConfigError(f"checkpoint {ctx.model!r} has no Mimi under `codec_config`")
    codec = load_module(ctx, MimiCodec, whole.codec_config, "codec_model.", ctx.dtype)
    keep_sizes_on_host(codec)
    return components(codec)


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of `codes` (int [frames, groups]) to `audio` (float32 [samples]).

    Encoding: `reference.0`, ... (float32 [samples], mono, at the codec's rate) to one `reference`
    each, with `codes` (int32 [frames, groups]).
    """
    config: MimiConfig = ctx.assets["config"]
    codec = ctx.component("codec", MimiCodec)
    if not ctx.options.get("encode"):
        decoding = CausalDecoding(causal_codec(config), codec.latents, codec.samples, ctx.device)
        decode_stream(ctx, decoding, config.sampling_rate)
        return

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = checked_recording(recording, config.frame_size)[None].to(ctx.device)
        return {"codes": encoded_frames(codec, samples, config.frame_size, config.num_quantizers)}

    encode_recordings(ctx, encode)
