# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's codec: codes to a waveform, and a recording to codes and a speaker embedding.

Reference: the authors' package `qwen-tts` 0.1.1, whose decoder runs on the whole sequence up to 300
frames (24 s). Beyond that it starts anew every 300th frame with 25 frames of context, which is
heard as a change of the sound; ours has all the context that a frame depends on, everywhere.

Decoding is causal (see `causal`), with exactly `decode_upsample_rate` samples per frame. A request
that continues a recording brings its codes as `reference_codes`; they are context, and the sound
starts at the first frame after them. (The reference cuts by a fraction of the length, which in
floating point may leave one sample of the recording.)

Encoding runs in one call, with the codec's attention window of 10 s. (The reference has it with
flash attention only: under transformers 4 its other kinds of attention ignore it, and recordings
longer than that get other codes.)
"""

import math

import torch

from vllm_omni.config.hf.qwen3_tts import Qwen3TTSConfig
from vllm_omni.config.hf.qwen3_tts_codec import Qwen3TTSCodecConfig, Qwen3TTSCodecDecoderConfig
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.causal import CausalCodec, CausalDecoding
from vllm_omni.diffusion.programs.mimi import encoded_frames
from vllm_omni.diffusion.programs.recordings import REFERENCE, checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_stream
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, load_module
from vllm_omni.errors import OmniClientError, OmniConfigError
from vllm_omni.models.mimi import keep_sizes_on_host
from vllm_omni.models.qwen3_tts_codec import CodecDecoder, CodecEncoder
from vllm_omni.models.qwen3_tts_speaker import SpeakerEncoder

FOLDER = "speech_tokenizer"
"""Of the codec in a checkpoint."""
TOKENIZER_TYPE = "qwen3_tts_tokenizer_12hz"
_PRE_SPAN = 2
"""Frames before the current one that the convolution before the transformer sees."""
_RESIDUAL_SPAN = 6 * (1 + 3 + 9)
"""Samples before the current one that the three residual units of a decoder block see."""
_KERNEL_SPAN = 6
"""Likewise for a causal convolution of kernel size 7."""


def attention_context(config: Qwen3TTSCodecDecoderConfig) -> int:
    """Frames before a frame that its latent depends on, through all layers."""
    return (config.sliding_window - 1) * config.num_hidden_layers + _PRE_SPAN


def convolution_context(config: Qwen3TTSCodecDecoderConfig) -> int:
    """Frames before a frame whose latents its samples depend on."""
    span = _KERNEL_SPAN
    for rate in reversed(config.upsample_rates):
        # A transposed convolution of twice the stride sees one of its inputs more.
        span = math.ceil((span + _RESIDUAL_SPAN) / rate) + 1
    span += _KERNEL_SPAN
    for ratio in reversed(config.upsampling_ratios):
        span = math.ceil((span + _KERNEL_SPAN) / ratio)
    return span


def causal_codec(config: Qwen3TTSCodecConfig) -> CausalCodec:
    """What the decoding of a stream has to know."""
    decoder = config.decoder_config
    return CausalCodec(
        decoder.num_quantizers,
        decoder.codebook_size,
        config.decode_upsample_rate,
        attention_context(decoder),
        convolution_context(decoder),
    )


def components(
    config: Qwen3TTSCodecConfig,
    decoder: CodecDecoder,
    encoder: CodecEncoder | None = None,
    speaker: SpeakerEncoder | None = None,
) -> Loaded:
    """The models as the program uses them; without the last two it encodes nothing."""
    up, down = config.decode_upsample_rate, config.encode_downsample_rate
    same = RaggedOutput(lambda frames: frames, dim=1)
    sizes, dtype = config.decoder_config, next(decoder.parameters()).dtype
    codes = Graphs(lambda rows, n: (torch.zeros(rows, sizes.num_quantizers, n, dtype=torch.int64),))
    latents = Graphs(lambda rows, n: (torch.zeros(rows, n, sizes.latent_dim, dtype=dtype),))
    sound = RaggedOutput(lambda frames: frames * up)
    parts = {
        "decoder": Component(
            decoder,
            {
                "latents": CallRules({"codes": Ragged(-1)}, same, graphs=codes),
                "samples": CallRules({"latents": Ragged(1)}, sound, graphs=latents, to_host=True),
            },
        )
    }
    if encoder is not None and speaker is not None:
        frames = RaggedOutput(lambda samples: samples // down, dim=1)
        parts["encoder"] = Component(
            encoder,
            {
                "frames": CallRules(),
                "whole_frames": CallRules({"samples": Ragged(-1)}, frames),
            },
        )
        parts["speaker"] = Component(speaker, {"embed": CallRules()})
    return Loaded(parts, {"config": config})


def load(ctx: LoadContext) -> Loaded:
    """Load `speech_tokenizer/` and, of a base checkpoint, `speaker_encoder.*`.

    What encodes is in float32 always.

    Raises:
        OmniConfigError: The checkpoint has another codec.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, Qwen3TTSConfig) or whole.tokenizer_type != TOKENIZER_TYPE:
        raise OmniConfigError(f"checkpoint {ctx.model!r} has no codec {TOKENIZER_TYPE!r}")
    config = Qwen3TTSCodecConfig.from_pretrained(ctx.model, subfolder=FOLDER, revision=ctx.revision)
    decoder = load_module(ctx, CodecDecoder, config.decoder_config, "decoder.", ctx.dtype, FOLDER)
    if whole.tts_model_type != "base":
        return components(config, decoder)
    exact = torch.float32
    encoder = load_module(ctx, CodecEncoder, config.encoder_config, "encoder.", exact, FOLDER)
    keep_sizes_on_host(encoder)
    voice = whole.speaker_encoder_config
    speaker = load_module(ctx, SpeakerEncoder, voice, "speaker_encoder.", exact)
    return components(config, decoder, encoder, speaker)


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of `codes` (int [frames, groups]) to `audio` (float32 [samples]);
    `reference_codes` (int [frames, groups]) with the first message are context before them.

    Encoding: `reference.0`, ... (float32 [samples], mono, 24 kHz) to one `reference` each, with
    `codes` (int32 [frames, groups]) and `x_vector` (float32 [enc_dim]).
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _decode(ctx)


def _decode(ctx: Program) -> None:
    config: Qwen3TTSCodecConfig = ctx.assets["config"]
    decoder = ctx.component("decoder", CodecDecoder)
    before = ctx.inbox[0].tensors.get("reference_codes")
    decoding = CausalDecoding(
        causal_codec(config), decoder.latents, decoder.samples, ctx.device, before
    )
    decode_stream(ctx, decoding, config.output_sample_rate)


def _encode(ctx: Program) -> None:
    if not ctx.has("encoder"):
        raise OmniClientError("this checkpoint takes no recordings of a voice", param=REFERENCE)
    encode_recordings(ctx, lambda recording: _encoded(ctx, recording))


def _encoded(ctx: Program, recording: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes and speaker embedding of a recording, on the CPU."""
    config: Qwen3TTSCodecConfig = ctx.assets["config"]
    encoder = ctx.component("encoder", CodecEncoder)
    speaker = ctx.component("speaker", SpeakerEncoder)
    hop = config.encode_downsample_rate
    samples = checked_recording(recording, hop)[None].to(ctx.device)
    codes = encoded_frames(encoder, samples, hop, config.encoder_valid_num_quantizers)
    return {"codes": codes, "x_vector": speaker.embed(samples)[0].cpu()}
