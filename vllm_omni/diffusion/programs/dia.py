# SPDX-License-Identifier: Apache-2.0
"""Dia's codec, DAC: rows of a delay pattern to a waveform, and a recording to codes.

Reference: transformers' `DacModel` as `DiaProcessor` uses it. Decoding is exact over windows (see
`twosided`); recordings of the same length are encoded together. All of it is in float32: another
precision would change the codes of recordings.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from transformers import DacConfig, DacModel, DiaConfig
from transformers.utils import cached_file

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import DelayedFrames
from vllm_omni.diffusion.programs.higgs_audio_v2 import dac_reach
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_delayed_stream
from vllm_omni.diffusion.programs.twosided import TwoSidedDecoding, sound_rules
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, load_module
from vllm_omni.errors import OmniConfigError
from vllm_omni.models import dac

FOLDER = "audio_tokenizer"
"""Of the codec, if the checkpoint has it."""
REPOSITORY = "descript/dac_44khz"
"""Has the codec, if the checkpoint does not say where it is."""
DESCRIPTIONS = ("audio_tokenizer_config.json", "processor_config.json")
"""Files of a checkpoint that may say where its codec is."""


class Codec(DacModel):
    """DAC, with the calls that a codec stage makes."""

    def samples(self, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """int64 [b, groups, frames], of which `lengths` (int64 [b]) are valid -> float32
        [b, samples], each sound followed by any numbers."""
        return dac.decode(self.decoder, self.quantizer.from_codes(codes)[0], lengths)

    def codes(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [b, samples], whole frames -> int32 [b, frames, groups]."""
        return self.encode(samples[:, None]).audio_codes.transpose(1, 2).int()


def load(ctx: LoadContext) -> Loaded:
    """Load the codec.

    Raises:
        OmniConfigError: There is none, or it does not fit the model.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, DiaConfig):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no Dia")
    place, folder = codec_place(ctx)
    config = DacConfig.from_pretrained(place.model, subfolder=folder, revision=place.revision)
    groups = len(whole.delay_pattern)
    if config.n_codebooks != groups:
        raise OmniConfigError(
            f"checkpoint {ctx.model!r} makes {groups} codes per frame, the codec in "
            f"{place.model!r} takes {config.n_codebooks}"
        )
    if any(ratio % 2 for ratio in config.downsampling_ratios):
        raise OmniConfigError(
            f"codec in {place.model!r}: downsampling_ratios = {config.downsampling_ratios}: should "
            "be even, for a whole number of samples per frame"
        )
    codec = load_module(place, Codec, config, "", torch.float32, folder)
    return components(codec, tuple(whole.delay_pattern))


def components(codec: Codec, delays: tuple[int, ...]) -> Loaded:
    """The model as the program uses it."""
    config = codec.config
    rules = {
        "samples": sound_rules(config.n_codebooks, config.hop_length),
        "codes": CallRules(),
    }
    reach = dac_reach(tuple(config.upsampling_ratios))
    return Loaded(
        {"codec": Component(codec, rules)}, {"config": config, "delays": delays, "reach": reach}
    )


def codec_place(ctx: LoadContext) -> tuple[LoadContext, str]:
    """What to load the codec from, and the folder in it: the checkpoint's own folder, what its
    processor's config names, or `REPOSITORY`."""
    if _file(ctx, f"{FOLDER}/config.json") is not None:
        return ctx, FOLDER
    for name in DESCRIPTIONS:
        named = _named(_file(ctx, name))
        if named is not None:
            return replace(ctx, model=named, revision=None), ""
    return replace(ctx, model=REPOSITORY, revision=None), ""


def _file(ctx: LoadContext, name: str) -> str | None:
    found = cached_file(
        ctx.model, name, revision=ctx.revision, _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else str(found)


def _named(path: str | None) -> str | None:
    """The codec that a processor's config names."""
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content.get("audio_tokenizer", content).get("audio_tokenizer_name_or_path")


def run(ctx: Program) -> None:
    """Decode, or encode if the option `encode` is true.

    Decoding: windows of frames, as rows `codes` (int [rows, groups]), to `audio` (float32
    [samples]).

    Encoding: `reference.0`, ... (float32 [samples], mono, at the codec's rate) to one `reference`
    each, with `codes` (int32 [frames, groups]).
    """
    if ctx.options.get("encode"):
        _encode(ctx)
    else:
        _decode(ctx)


def _decode(ctx: Program) -> None:
    config: DacConfig = ctx.assets["config"]
    codec = ctx.component("codec", Codec)
    hop = config.hop_length
    frames = DelayedFrames(ctx.assets["delays"], config.codebook_size, other=None)
    decoding = TwoSidedDecoding(codec.samples, hop, ctx.assets["reach"])
    decode_delayed_stream(ctx, decoding, frames, config.sampling_rate, hop)


def _encode(ctx: Program) -> None:
    config: DacConfig = ctx.assets["config"]
    codec = ctx.component("codec", Codec)
    hop = config.hop_length

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = checked_recording(recording, hop)
        whole = functional.pad(samples, (0, -len(samples) % hop))[None].to(ctx.device)
        return {"codes": codec.codes(whole)[0].cpu()}

    encode_recordings(ctx, encode)
