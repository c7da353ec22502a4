# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS's codec: codes to a waveform, and a recording to codes.

Codes come and go with the special ones before them, as the language model has them. Decoding is
causal (see `causal`), with exactly `samples_per_frame` samples per frame; the published
implementation decodes anew every 375 frames (row B-44), which is heard. Here a window is decoded in
parts of so many, so that attention fits in memory, each with all the frames before it that it
depends on.

Published checkpoints cannot encode: they have voices instead. One that has the encoder's weights
takes recordings.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from msgspec.structs import replace
from torch import nn

from vllm_omni.config.checkpoint import load_hf_config
from vllm_omni.config.hf.voxtral_tts import SPECIAL_CODES, VoxtralCodecConfig, VoxtralTTSConfig
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.causal import CausalCodec, CausalDecoding
from vllm_omni.diffusion.programs.recordings import REFERENCE, checked_recording, encode_recordings
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import fill_codec, read_tensors
from vllm_omni.errors import OmniClientError, OmniConfigError
from vllm_omni.inputs import Window
from vllm_omni.models.voxtral_codec import (
    CodecDecoder,
    CodecEncoder,
    decoder_context,
    fuse_weight_norms,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

PART = 375
"""Most frames that are decoded in one call, beside their context: 30 s."""
WEIGHTS = "consolidated.safetensors"
_PREFIX = "audio_tokenizer."
_ENCODER = "encoder_blocks."


def components(
    config: VoxtralCodecConfig, decoder: CodecDecoder, encoder: CodecEncoder | None
) -> Loaded:
    """The models as the program uses them; without the encoder it encodes nothing."""
    size, groups = config.samples_per_frame, 1 + config.acoustic_dim
    rule = CallRules(
        {"codes": Ragged(1)},
        RaggedOutput(lambda frames: frames * size),
        graphs=Graphs(lambda rows, n: (torch.zeros(rows, n, groups, dtype=torch.int64),)),
        to_host=True,
    )
    rules = {"forward": rule}
    parts = {"decoder": Component(decoder, rules)}
    if encoder is not None:
        parts["encoder"] = Component(encoder, {"forward": CallRules()})
    return Loaded(parts, {"config": config})


def load(ctx: LoadContext) -> Loaded:
    """Load `audio_tokenizer.*`. What encodes is in float32 always.

    Raises:
        OmniConfigError: The checkpoint is of another family, or lacks weights.
    """
    whole = load_hf_config(ctx.model, revision=ctx.revision)
    if not isinstance(whole, VoxtralTTSConfig):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no Voxtral TTS")
    config = whole.codec_config
    tensors = {} if ctx.random_weights else read_tensors(ctx, _PREFIX, file=WEIGHTS)
    decoder = _module(ctx, CodecDecoder, config, tensors, ctx.dtype)
    encoder = None
    if any(name.startswith(_ENCODER) for name in tensors):
        encoder = _module(ctx, CodecEncoder, config, tensors, torch.float32)
    return components(config, decoder, encoder)


def _module(
    ctx: LoadContext,
    make: Callable[[VoxtralCodecConfig], ModuleT],
    config: VoxtralCodecConfig,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype | None,
) -> ModuleT:
    """A part of the codec; without tensors, at random."""
    module = make(config)
    if tensors:
        fill_codec(ctx, module, tensors)
        if dtype is None:
            dtype = next(t.dtype for t in tensors.values() if t.is_floating_point())
    fuse_weight_norms(module)
    return module.to(device=ctx.device, dtype=dtype).eval().requires_grad_(False)


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of `codes` (int [frames, groups]) to `audio` (float32 [samples]).

    Encoding: `reference.0`, ... (float32 [samples], mono, at the codec's rate) to one `reference`
    each, with `codes` (int32 [frames, groups]).
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _decode(ctx)


def parts(window: Window) -> Iterator[Window]:
    """The window in parts of at most `PART` frames that are new."""
    start = window.emit_from
    while window.emit_to - start > PART:
        stop = start + PART
        yield replace(window, stop=stop, emit_from=start, emit_to=stop, last=False)
        start = stop
    yield replace(window, emit_from=start)


def _decode(ctx: Program) -> None:
    config: VoxtralCodecConfig = ctx.assets["config"]
    codec = CausalCodec(
        1 + config.acoustic_dim,
        config.semantic_codebook_size,
        config.samples_per_frame,
        attention=0,
        convolution=decoder_context(config),
    )
    decoder = ctx.component("decoder", CodecDecoder)
    # Frames need nothing before they are decoded: attention is between the convolutions here.
    decoding = CausalDecoding(codec, lambda codes: codes.mT, decoder, ctx.device)
    final = False
    while not final:
        message = ctx.receive()
        final = message.final
        if "codes" in message.tensors:
            decoding.append(message.tensors["codes"] - SPECIAL_CODES)
        for window in message.windows:
            samples = torch.cat([decoding(part) for part in parts(window)])
            meta = {
                "sample_rate": config.sampling_rate,
                "frames": window.emit_to - window.emit_from,
            }
            ctx.emit("audio", {"audio": samples}, meta)


def _encode(ctx: Program) -> None:
    if not ctx.has("encoder"):
        raise OmniClientError("this checkpoint takes no recordings of a voice", param=REFERENCE)
    config: VoxtralCodecConfig = ctx.assets["config"]
    encoder = ctx.component("encoder", CodecEncoder)

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = checked_recording(recording, config.samples_per_frame)[None].to(ctx.device)
        return {"codes": (encoder(samples)[0] + SPECIAL_CODES).int().cpu()}

    encode_recordings(ctx, encode)
