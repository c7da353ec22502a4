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
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        samples_per_frame: int,
        context: int,
    ) -> None:
        self._decode = decode
        self._context = context
        self._frames = RowBuffer()
        self._stitcher = Stitcher(samples_per_frame)

    def append(self, frames: torch.Tensor) -> None:
        """Add frames [n, width]."""
        self._frames.append(frames)

    def __call__(self, window: Window) -> torch.Tensor:
        """The samples that the window appends to the stream."""
        done = self._stitcher.emitted // self._stitcher.samples_per_frame
        start = max(0, done - self._context)
        frames = self._frames.rows(start, window.stop)[None]
        samples = self._stitcher.take(
            Window(start, window.stop, window.emit_from, window.emit_to, window.last),
            self._decode(frames)[0],
        )
        self._frames.forget(window.emit_to - self._context)
        return samples
