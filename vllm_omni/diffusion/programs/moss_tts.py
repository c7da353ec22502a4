# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS's codec: rows of a delay pattern to a waveform, and a recording to codes.

Reference: `modeling_moss_audio_tokenizer.py` and `processing_moss_tts.py` of the published
checkpoints. Rows before the first one with a code hold no sound. Codes that are none of the codec
become its nearest one; no frames are no sound (row A-68).

A stream goes on from what the codec's layers remember (see `MossDecoder`), so its joined pieces are
the one-shot decode. Recordings are made as loud as those that the model was trained with, within
3 dB, and cut to whole frames, as the reference does.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from transformers.initialization import no_init_weights

from vllm_omni.config.hf.moss_tts import MossAudioTokenizerConfig, MossTTSConfig
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import DelayedFrames, RowBuffer
from vllm_omni.diffusion.programs.moss_files import codec_place
from vllm_omni.diffusion.programs.recordings import checked_recording, encode_recordings
from vllm_omni.diffusion.programs.streams import decode_stream
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.diffusion.weights import checkpoint_config, read_tensors
from vllm_omni.errors import OmniConfigError
from vllm_omni.inputs import Window
from vllm_omni.models.moss_codec import MossDecoder, MossEncoder
from vllm_omni.pipelines.moss_tts import delays

ModuleT = TypeVar("ModuleT", bound=nn.Module)

MOST_FRAMES = 100
"""Of a call: attention of the fastest transformer needs the square of it."""
LOUDNESS = -20.0
"""Of recordings, dB of full scale."""
MOST_GAIN = 3.0
"""dB, either way."""


def components(
    config: MossAudioTokenizerConfig,
    decoder: MossDecoder,
    encoder: MossEncoder,
    groups: int,
    pad: int,
) -> Loaded:
    """The models as the program uses them.

    Args:
        config: The codec's.
        decoder: On its device.
        encoder: Likewise.
        groups: Codes per frame of the model.
        pad: Code that is none.
    """
    rate = config.downsample_rate
    whole = RaggedOutput(lambda samples: samples // rate, dim=1)
    parts = {
        "decoder": Component(
            decoder,
            {"forward": CallRules({"codes": Ragged(-1)}, graphs=Graphs(_example(decoder, groups)))},
        ),
        "encoder": Component(encoder, {"forward": CallRules({"samples": Ragged(-1)}, whole)}),
    }
    memory = decoder.new_memory
    return Loaded(parts, {"config": config, "groups": groups, "pad": pad, "memory": memory})


def _example(
    decoder: MossDecoder, groups: int
) -> Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
    """Arguments of the decoder, of streams that begin."""

    def example(
        rows: int, frames: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        codes = torch.zeros(rows, groups, frames, dtype=torch.int64)
        seen = torch.zeros(rows, dtype=torch.int64)
        memory = decoder.new_memory(torch.device("cpu"))
        whole = [each.expand(rows, *each.shape[1:]) for each in memory]
        return codes, seen, torch.full_like(seen, frames), whole

    return example


def load(ctx: LoadContext) -> Loaded:
    """Load the codec, in float32: another precision would change the codes of recordings.

    Raises:
        OmniConfigError: It does not fit the model, or is none that is known here.
    """
    whole = checkpoint_config(ctx)
    if not isinstance(whole, MossTTSConfig):
        raise OmniConfigError(f"checkpoint {ctx.model!r} is no MOSS-TTS")
    place, folder = codec_place(ctx)
    config = MossAudioTokenizerConfig.from_pretrained(
        place.model, subfolder=folder, revision=place.revision
    )
    _check(ctx, place, config, whole)
    tensors = {} if ctx.random_weights else read_tensors(place, "", folder)
    tensors = {_current_name(name): tensor for name, tensor in tensors.items()}
    decoder = _module(place, MossDecoder, config, tensors)
    encoder = _module(place, MossEncoder, config, tensors)
    return components(config, decoder, encoder, whole.n_vq, whole.audio_pad_code)


def _check(
    ctx: LoadContext, place: LoadContext, config: MossAudioTokenizerConfig, whole: MossTTSConfig
) -> None:
    sizes = config.quantizer_kwargs or {}
    if (config.number_channels or 1) != 1:
        raise OmniConfigError(f"the codec in {place.model!r} is not of one channel")
    if sizes.get("num_quantizers", 0) < whole.n_vq:
        raise OmniConfigError(
            f"checkpoint {ctx.model!r} makes {whole.n_vq} codes per frame, the codec in "
            f"{place.model!r} knows {sizes.get('num_quantizers')}"
        )


def _current_name(name: str) -> str:
    """As the reference names its parameters now."""
    for old, new in (
        (".weight_g", ".parametrizations.weight.original0"),
        (".weight_v", ".parametrizations.weight.original1"),
        (".in_proj_weight", ".in_projs.0.weight"),
        (".self_attn.in_proj.", ".self_attn.in_projs.0."),
        (".self_attn.out_proj.", ".self_attn.out_projs.0."),
    ):
        name = name.replace(old, new)
    return name


def _module(
    place: LoadContext,
    make: Callable[[MossAudioTokenizerConfig, list[str]], ModuleT],
    config: MossAudioTokenizerConfig,
    tensors: dict[str, torch.Tensor],
) -> ModuleT:
    """A part of the codec; without tensors, at random."""
    try:
        if not tensors:
            module = make(config, [])
        else:
            with no_init_weights():
                module = make(config, list(tensors))
            wanted = module.state_dict()
            module.load_state_dict({k: v for k, v in tensors.items() if k in wanted}, strict=True)
    except (ValueError, KeyError, RuntimeError) as error:
        raise OmniConfigError(f"codec in {place.model!r}: {error}") from error
    return module.to(device=place.device, dtype=torch.float32).eval().requires_grad_(False)


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


class FrameRows:
    """Frames of rows, of which the first ones may hold no code."""

    def __init__(self, groups: int, size: int, pad: int) -> None:
        self._frames = DelayedFrames(delays(groups), size, other=None)
        self._pad = pad
        self._silent = True

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """The frames that they complete, int64 [m, groups]."""
        if self._silent:
            sounding = (rows[:, 0] != self._pad).nonzero()
            self._silent = len(sounding) == 0
            rows = rows[len(rows) if self._silent else int(sounding[0]) :]
        return self._frames.add(rows)


class StreamDecoding:
    """One stream.

    Args:
        ctx: Whose.
        frames: Makes frames of its rows.
    """

    def __init__(self, ctx: Program, frames: FrameRows) -> None:
        self._frames = frames
        self._decoder = ctx.component("decoder", MossDecoder)
        self._device = ctx.device
        self._rate: int = ctx.assets["config"].downsample_rate
        self._memory = ctx.assets["memory"](ctx.device)
        self._codes = RowBuffer()
        self._done = 0

    def append(self, rows: torch.Tensor) -> None:
        """Add rows, int [n, groups]."""
        self._codes.append(self._frames.add(rows))

    def __call__(self, window: Window) -> torch.Tensor:
        """The samples that the window appends to the stream."""
        pieces = []
        while self._done < window.emit_to:
            stop = min(window.emit_to, self._done + MOST_FRAMES)
            codes = self._codes.rows(self._done, stop).T[None].to(self._device)
            seen = torch.tensor([self._done], device=self._device)
            count = stop - self._done
            samples, self._memory = self._decoder(
                codes, seen, torch.full_like(seen, count), self._memory
            )
            # Behind them are those of padding, if other streams had more frames.
            pieces.append(samples[0, : count * self._rate])
            self._done = stop
            self._codes.forget(stop)
        return torch.cat(pieces) if pieces else torch.zeros(0)


def _decode(ctx: Program) -> None:
    config: MossAudioTokenizerConfig = ctx.assets["config"]
    sizes = config.quantizer_kwargs or {}
    frames = FrameRows(ctx.assets["groups"], sizes["codebook_size"], ctx.assets["pad"])
    decode_stream(ctx, StreamDecoding(ctx, frames), config.sampling_rate)


def _encode(ctx: Program) -> None:
    config: MossAudioTokenizerConfig = ctx.assets["config"]
    encoder = ctx.component("encoder", MossEncoder)
    rate = config.downsample_rate

    def encode(recording: torch.Tensor) -> dict[str, torch.Tensor]:
        samples = _leveled(checked_recording(recording, rate))
        samples = samples[None, : len(samples) // rate * rate].to(ctx.device)
        return {"codes": encoder(samples, groups=ctx.assets["groups"])[0].int().cpu()}

    encode_recordings(ctx, encode)


def _leveled(samples: torch.Tensor) -> torch.Tensor:
    """Nearer to `LOUDNESS`."""
    level = 10 * torch.log10(samples.square().mean() + 1e-9)
    gain = (LOUDNESS - level).clamp(-MOST_GAIN, MOST_GAIN)
    return samples * 10 ** (gain / 20)
