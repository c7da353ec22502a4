# SPDX-License-Identifier: Apache-2.0
"""Decoding a stream of codec frames by a decoder that looks ahead.

Each piece is decoded with all the frames before and after it that it depends on, whatever context
the windows have, and sound is given as soon as the frames after it are there: the joined stream is
the one-shot decode.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_omni.diffusion.programs.frames import RowBuffer
from vllm_omni.framing import Stitcher
from vllm_omni.inputs import Window


@dataclass(frozen=True, slots=True)
class Reach:
    """Frames that the samples of a frame depend on, beside itself.

    Attributes:
        before: Earlier frames.
        after: Later frames.
    """

    before: int
    after: int


class TwoSidedDecoding:
    """One stream; windows come in order.

    Args:
        decode: Codes int64 [1, groups, frames] on `device` -> samples [1, n].
        samples_per_frame: Waveform samples.
        reach: Of the decoder.
        device: Of the decoder.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor], torch.Tensor],
        samples_per_frame: int,
        reach: Reach,
        device: torch.device,
    ) -> None:
        self._decode = decode
        self._reach = reach
        self._device = device
        self._codes = RowBuffer()
        self._stitcher = Stitcher(samples_per_frame)

    def append(self, codes: torch.Tensor) -> None:
        """Add frames, int64 [n, groups], valid."""
        self._codes.append(codes)

    def advance(self, window: Window) -> torch.Tensor | None:
        """The samples that the window makes certain; None for none yet."""
        emit_to = window.emit_to if window.last else window.stop - self._reach.after
        return self._samples(window.stop, min(emit_to, window.emit_to), window.last)

    def finish(self) -> torch.Tensor | None:
        """The samples that were held back, once no frame follows; None for none."""
        return self._samples(self._codes.stop, self._codes.stop, last=True)

    def _samples(self, stop: int, emit_to: int, last: bool) -> torch.Tensor | None:
        decoded = self._stitcher.emitted // self._stitcher.samples_per_frame
        if emit_to <= decoded:
            return None
        start = max(0, decoded - self._reach.before)
        codes = self._codes.rows(start, stop).T[None].to(self._device)
        window = Window(start, stop, decoded, emit_to, last)
        samples = self._stitcher.take(window, self._decode(codes)[0])
        self._codes.forget(emit_to - self._reach.before)
        return samples
