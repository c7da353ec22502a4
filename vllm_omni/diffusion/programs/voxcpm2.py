# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2's codec as a program: frames of latents to sound, and recordings to frames.

Reference: `AudioVAE` (v2) of the authors' package, whose weights lie in a file of their own. It
runs in float32, as there.
"""

from typing import Any

import torch
from safetensors.torch import load_file

from vllm_omni.config.hf.voxcpm2 import VoxCPM2Config
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.convolutions import ConvolutionDecoding
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_stream
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, checkpoint_file
from vllm_omni.errors import OmniConfigError
from vllm_omni.models.voxcpm2_codec import SoundDecoder, SoundEncoder, decoder_context, folded
from vllm_omni.pipelines.voxcpm2 import CODEC_FILES


def load(ctx: LoadContext) -> Loaded:
    """Load the codec.

    Raises:
        OmniConfigError: There is none, or it does not fit its config.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, VoxCPM2Config):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no VoxCPM2")
    config: dict[str, Any] = whole.audio_vae_config
    encoder, decoder = SoundEncoder(config), SoundDecoder(config)
    if not ctx.random_weights:
        tensors = folded(_tensors(ctx))
        _fill(ctx, encoder, "encoder.", tensors, unused=("fc_logvar.",))
        _fill(ctx, decoder, "decoder.", tensors, unused=("sr_bin_boundaries",))
    for module in (encoder, decoder):
        module.to(device=ctx.device, dtype=torch.float32).eval().requires_grad_(False)
    rules = {
        "encoder": CallRules(
            {"samples": Ragged(-1)}, RaggedOutput(lambda n: n // encoder.hop, dim=1)
        ),
        "decoder": CallRules(
            {"latents": Ragged(1)},
            RaggedOutput(lambda n: n * decoder.hop),
            graphs=Graphs(lambda rows, n: (torch.zeros(rows, n, config["latent_dim"]),)),
            to_host=True,
        ),
    }
    return Loaded(
        {
            "encoder": Component(encoder, {"latents": rules["encoder"]}),
            "decoder": Component(decoder, {"samples": rules["decoder"]}),
        },
        {"config": whole},
    )


def _tensors(ctx: LoadContext) -> dict[str, torch.Tensor]:
    """Of the codec's file: safetensors if there is one."""
    safe, pickled = CODEC_FILES
    try:
        return load_file(checkpoint_file(ctx, safe))
    except OSError:
        saved = torch.load(checkpoint_file(ctx, pickled), map_location="cpu", weights_only=True)
        return saved.get("state_dict", saved)


def _fill(
    ctx: LoadContext,
    module: torch.nn.Module,
    prefix: str,
    tensors: dict[str, torch.Tensor],
    unused: tuple[str, ...],
) -> None:
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(unused)
    }
    try:
        module.load_state_dict(own, strict=True)
    except RuntimeError as error:
        raise OmniConfigError(f"codec of {ctx.model!r}: {error}") from error


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of `latents` (float32 [frames, patch * latent size]) to `audio` (float32
    [samples]); `reference_codes`, likewise, with the first message are context before them.

    Encoding: `reference.0`, ... (float32 [samples], mono, at the codec's rate) to one `reference`
    each, with `latents` (float32 [frames, patch * latent size]) of a voice to speak in, whose last
    frame is filled with silence, and `begun` (the same) of speech to go on with, whose first is.
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _decode(ctx)


def _decode(ctx: Program) -> None:
    config: VoxCPM2Config = ctx.assets["config"]
    codec = config.audio_vae_config
    decoder = ctx.component("decoder", SoundDecoder)
    patch = config.patch_size

    def decode(frames: torch.Tensor) -> torch.Tensor:
        return decoder.samples(frames.to(ctx.device).view(1, -1, config.feat_dim))

    context = -(-decoder_context(codec) // patch)
    before = ctx.inbox[0].tensors.get("reference_codes")
    decoding = ConvolutionDecoding(decode, patch * decoder.hop, context, before)
    decode_stream(ctx, decoding, codec["out_sample_rate"], "latents")


def _encode(ctx: Program) -> None:
    config: VoxCPM2Config = ctx.assets["config"]
    encoder = ctx.component("encoder", SoundEncoder)
    size = config.patch_size * encoder.hop

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = checked_recording(recording, 1)
        missing = -len(samples) % size
        made = {}
        for name, padding in (("latents", (0, missing)), ("begun", (missing, 0))):
            padded = torch.nn.functional.pad(samples, padding)
            latents = encoder.latents(padded[None].to(ctx.device))[0].float().cpu()
            made[name] = latents.reshape(len(latents) // config.patch_size, -1)
        return made

    encode_recordings(ctx, encode)
