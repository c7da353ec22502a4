# SPDX-License-Identifier: Apache-2.0
"""Decoding what a request's messages bring, to their end."""

from typing import Protocol

import torch

from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.frames import DelayedFrames
from vllm_omni.diffusion.programs.twosided import TwoSidedDecoding
from vllm_omni.inputs import Window


class Decoding(Protocol):
    """The decoding of one stream; windows come in order."""

    def append(self, frames: torch.Tensor) -> None:
        """Add frames, [n, ...]."""

    def __call__(self, window: Window) -> torch.Tensor:
        """The samples that the window appends to the stream."""


def decode_stream(ctx: Program, decoding: Decoding, sample_rate: int, name: str = "codes") -> None:
    """Decode frames that come as `name`; emits `audio` (float32 [samples])."""
    final = False
    while not final:
        message = ctx.receive()
        final = message.final
        if name in message.tensors:
            decoding.append(message.tensors[name])
        for window in message.windows:
            ctx.emit(
                "audio",
                {"audio": decoding(window)},
                {"sample_rate": sample_rate, "frames": window.emit_to - window.emit_from},
            )


def decode_delayed_stream(
    ctx: Program, decoding: TwoSidedDecoding, frames: DelayedFrames, sample_rate: int, hop: int
) -> None:
    """Decode rows of a delay pattern that come as `codes`, by a decoder that looks ahead; emits
    `audio` (float32 [samples]).

    Args:
        ctx: Of the request.
        decoding: Of the stream.
        frames: Makes frames of rows.
        sample_rate: Hz.
        hop: Samples per frame.
    """

    def emit(samples: torch.Tensor | None) -> None:
        if samples is not None:
            meta = {"sample_rate": sample_rate, "frames": len(samples) // hop}
            ctx.emit("audio", {"audio": samples}, meta)

    final = False
    while not final:
        message = ctx.receive()
        final = message.final
        if "codes" in message.tensors:
            decoding.append(frames.add(message.tensors["codes"]))
        for window in message.windows:
            emit(decoding.advance(window))
    emit(decoding.finish())
