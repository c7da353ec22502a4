# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v2's codec: rows of a delay pattern to a waveform, and a recording to codes.

Reference: transformers' `HiggsAudioV2TokenizerModel` and `HiggsAudioV2Processor.batch_decode`.
Windows are counted in whole frames, which are made of the rows here; too few rows are none (row
A-65). Codes that are none of the codec (begin, end) become its last one, as in the reference.

Decoding is exact over windows (see `twosided`). Recordings of the same length are encoded together:
the semantic model hears the whole recording, and padding would change its codes.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from transformers import HiggsAudioV2Config, HiggsAudioV2TokenizerConfig
from transformers.initialization import no_init_weights

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import DelayedFrames
from vllm_omni.diffusion.programs.higgs_files import codec_place
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_delayed_stream
from vllm_omni.diffusion.programs.twosided import Reach, TwoSidedDecoding, sound_rules
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, fill_codec, read_tensors
from vllm_omni.errors import OmniConfigError
from vllm_omni.models.higgs_audio_codec import CodecDecoder, CodecEncoder
from vllm_omni.pipelines.higgs_audio_v2 import delays

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_KERNEL_SPAN = 3
"""Samples on each side that a convolution of kernel size 7 sees."""
_RESIDUAL_SPAN = _KERNEL_SPAN * (1 + 3 + 9)
"""Likewise, the three residual units of a decoder block."""


def decoder_reach(config: HiggsAudioV2TokenizerConfig) -> Reach:
    """Frames that the samples of a frame depend on."""
    return dac_reach(tuple(config.acoustic_model_config.upsampling_ratios))


def dac_reach(upsampling_ratios: tuple[int, ...]) -> Reach:
    """Likewise, of a DAC's decoder."""
    first, last = 0, math.prod(upsampling_ratios) - 1
    first, last = first - _KERNEL_SPAN, last + _KERNEL_SPAN
    for stride in reversed(upsampling_ratios):
        first, last = first - _RESIDUAL_SPAN, last + _RESIDUAL_SPAN
        padding = math.ceil(stride / 2)
        # A transposed convolution of kernel size 2 * stride.
        first = math.ceil((first + padding + 1) / stride) - 2
        last = (last + padding) // stride
    return Reach(_KERNEL_SPAN - first, last + _KERNEL_SPAN)


def components(
    config: HiggsAudioV2TokenizerConfig,
    decoder: CodecDecoder,
    encoder: CodecEncoder,
    delays: tuple[int, ...],
    other: int | None,
) -> Loaded:
    """The models as the program uses them; `other` as `DelayedFrames` says."""
    parts = {
        "decoder": Component(
            decoder, {"forward": sound_rules(config.num_quantizers, config.hop_length)}
        ),
        "encoder": Component(encoder, {"forward": CallRules()}),
    }
    assets = {"config": config, "delays": delays, "other": other, "reach": decoder_reach(config)}
    return Loaded(parts, assets)


def load(ctx: LoadContext) -> Loaded:
    """Load the codec, in float32: another precision would change the codes of recordings.

    Raises:
        OmniConfigError: There is none, or it does not fit the model.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, HiggsAudioV2Config):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no Higgs-Audio v2")
    place, folder = codec_place(ctx)
    config = HiggsAudioV2TokenizerConfig.from_pretrained(
        place.model, subfolder=folder, revision=place.revision
    )
    check_groups(ctx, config, whole.num_codebooks, place.model)
    tensors = {} if ctx.random_weights else read_tensors(place, "", folder)
    return load_parts(ctx, config, tensors, delays(whole), other=None)


def check_groups(
    ctx: LoadContext, config: HiggsAudioV2TokenizerConfig, groups: int, place: str
) -> None:
    """Refuse a codec of another number of codes per frame than the model makes.

    Raises:
        OmniConfigError: It is one.
    """
    if config.num_quantizers != groups:
        raise OmniConfigError(
            f"checkpoint {ctx.model!r} makes {groups} codes per frame, the codec in {place!r} "
            f"takes {config.num_quantizers}"
        )


def load_parts(
    ctx: LoadContext,
    config: HiggsAudioV2TokenizerConfig,
    tensors: dict[str, torch.Tensor],
    delays: tuple[int, ...],
    other: int | None,
) -> Loaded:
    """The codec with these weights, or at random without any; the rest as `components` says.

    Raises:
        OmniConfigError: They are not its weights.
    """
    tensors = {_current_name(name): tensor for name, tensor in tensors.items()}
    decoder = _module(ctx, CodecDecoder, config, tensors)
    return components(config, decoder, _module(ctx, CodecEncoder, config, tensors), delays, other)


def _current_name(name: str) -> str:
    """As torch names weight norms now."""
    for old, new in (("_g", "0"), ("_v", "1")):
        name = name.replace(f".weight{old}", f".parametrizations.weight.original{new}")
    return name


def _module(
    ctx: LoadContext,
    make: Callable[[HiggsAudioV2TokenizerConfig], ModuleT],
    config: HiggsAudioV2TokenizerConfig,
    tensors: dict[str, torch.Tensor],
) -> ModuleT:
    """A part of the codec; without tensors, at random."""
    if not tensors:
        module = make(config)
    else:
        with no_init_weights():
            module = make(config)
        fill_codec(ctx, module, tensors)
    return module.to(device=ctx.device, dtype=torch.float32).eval().requires_grad_(False)


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of frames, as rows `codes` (int [rows, groups]), to `audio` (float32
    [samples]).

    Encoding: `reference.0`, ... (float32 [samples], mono, 24 kHz) to one `reference` each, with
    `codes` (int32 [frames, groups]).
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _decode(ctx)


def _decode(ctx: Program) -> None:
    config: HiggsAudioV2TokenizerConfig = ctx.assets["config"]
    decoder = ctx.component("decoder", CodecDecoder)
    hop = config.hop_length
    frames = DelayedFrames(ctx.assets["delays"], config.codebook_size, ctx.assets["other"])
    decoding = TwoSidedDecoding(decoder, hop, ctx.assets["reach"])
    decode_delayed_stream(ctx, decoding, frames, config.sample_rate, hop)


def _encode(ctx: Program) -> None:
    config: HiggsAudioV2TokenizerConfig = ctx.assets["config"]
    encoder = ctx.component("encoder", CodecEncoder)

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = checked_recording(recording, config.hop_length)[None].to(ctx.device)
        return {"codes": encoder(samples)[0].T.int().cpu()}

    encode_recordings(ctx, encode)
