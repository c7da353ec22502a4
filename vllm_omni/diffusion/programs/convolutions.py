# SPDX-License-Identifier: Apache-2.0
"""Decoding a stream of frames by causal convolutions alone: exact over windows."""

from collections.abc import Callable

import torch

from vllm_omni.diffusion.programs.frames import RowBuffer
from vllm_omni.framing import Stitcher
from vllm_omni.inputs import Window


class ConvolutionDecoding:
    """One stream; each piece is decoded after the frames that it depends on, whatever context the
    windows have.

    Args:
        decode: Frames [1, n, width] -> samples [1, n * samples_per_frame].
        samples_per_frame: Waveform samples.
        context: Frames before a frame that its samples depend on.
        before: Frames [m, width] that come before those of windows, and are not heard.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        samples_per_frame: int,
        context: int,
        before: torch.Tensor | None = None,
    ) -> None:
        self._decode = decode
        self._context = context
        self._frames = RowBuffer()
        self._stitcher = Stitcher(samples_per_frame)
        self._before = 0 if before is None else len(before)
        if before is not None:
            self._frames.append(before)
            self._stitcher.emitted = self._before * samples_per_frame

    def append(self, frames: torch.Tensor) -> None:
        """Add frames [n, width]."""
        self._frames.append(frames)

    def __call__(self, window: Window) -> torch.Tensor:
        """The samples that the window appends to the stream."""
        done = self._stitcher.emitted // self._stitcher.samples_per_frame
        start = max(0, done - self._context)
        stop, emit_to = self._before + window.stop, self._before + window.emit_to
        frames = self._frames.rows(start, stop)[None]
        samples = self._stitcher.take(
            Window(start, stop, self._before + window.emit_from, emit_to, window.last),
            self._decode(frames)[0],
        )
        self._frames.forget(emit_to - self._context)
        return samples
