# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's second stage: frames of sound to packets, and recordings to latents.

Reference: transformers' `VibeVoiceAcousticTokenizerModel.encode` and its feature extractor. The
encoder is a variational one: what a recording is encoded to has noise added, of a strength that is
drawn, too. It is drawn from the same seed for every recording here, so the same recording gives the
same voice.
"""

import torch
from transformers import (
    VibeVoiceAcousticTokenizerConfig,
    VibeVoiceAcousticTokenizerEncoderModel,
    VibeVoiceAcousticTokenizerFeatureExtractor,
    VibeVoiceConfig,
)

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import RowBuffer
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.rules import CallRules, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, load_module
from vllm_omni.errors import OmniConfigError

NOISE_SEED = 0
"""Of what is added to the latents of a recording."""


class RecordingEncoder(VibeVoiceAcousticTokenizerEncoderModel):
    """transformers' own. Causal: a frame depends on nothing after it."""

    def means(self, samples: torch.Tensor) -> torch.Tensor:
        """[b, samples], whole frames -> [b, frames, latent size]."""
        return self(samples[:, None].to(self.dtype)).latents


def load(ctx: LoadContext) -> Loaded:
    """Load the encoder for recordings.

    Raises:
        OmniConfigError: The checkpoint is of another kind.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, VibeVoiceConfig):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no VibeVoice")
    config: VibeVoiceAcousticTokenizerConfig = whole.audio_config
    encoder = load_module(
        ctx, RecordingEncoder, config.encoder_config, "model.audio_tower.encoder.", ctx.dtype
    )
    hop = config.hop_length
    rule = CallRules({"samples": Ragged(-1)}, RaggedOutput(lambda samples: samples // hop, dim=1))
    extractor = VibeVoiceAcousticTokenizerFeatureExtractor.from_pretrained(
        ctx.model, revision=ctx.revision
    )
    return Loaded(
        {"encoder": Component(encoder, {"means": rule})},
        {"config": config, "extractor": extractor},
    )


def run(ctx: Program) -> None:
    """Pass sound on, or encode if the option `encode` is true.

    Sound: windows of rows `sound` (float32 [n, 1 + hop]), whose first column is 0 where there is
    none, to `audio` (float32 [samples]).

    Encoding: `reference.0`, ... (float32 [samples], mono, 24 kHz) to one `reference` each, with
    `latents` (float32 [frames, latent size]).
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _pass_on(ctx)


def _pass_on(ctx: Program) -> None:
    rate = ctx.assets["extractor"].sampling_rate
    rows = RowBuffer()
    final = False
    while not final:
        message = ctx.receive()
        final = message.final
        if "sound" in message.tensors:
            rows.append(message.tensors["sound"])
        for window in message.windows:
            frames = rows.rows(window.emit_from, window.emit_to)
            sound = frames[frames[:, 0] > 0, 1:]
            rows.forget(window.emit_to)
            if len(sound):
                meta = {"sample_rate": rate, "frames": len(sound)}
                ctx.emit("audio", {"audio": sound.reshape(-1)}, meta)


def _encode(ctx: Program) -> None:
    config: VibeVoiceAcousticTokenizerConfig = ctx.assets["config"]
    extractor: VibeVoiceAcousticTokenizerFeatureExtractor = ctx.assets["extractor"]
    encoder = ctx.component("encoder", RecordingEncoder)

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        heard = checked_recording(recording, config.hop_length).numpy()
        inputs = extractor(heard, sampling_rate=extractor.sampling_rate)
        means = encoder.means(inputs["input_values"][:, 0].to(ctx.device))[0]
        return {"latents": _varied(means.float().cpu(), config.vae_std)}

    encode_recordings(ctx, encode)


def _varied(means: torch.Tensor, deviation: float) -> torch.Tensor:
    """Latents float32 [frames, latent size], drawn as the reference draws them."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    strength = deviation * torch.randn(1, generator=generator)
    return means + strength * torch.randn(means.shape, generator=generator)
