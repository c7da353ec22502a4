# SPDX-License-Identifier: Apache-2.0
"""Decoding a stream of codec frames by a decoder that looks ahead.

Each piece is decoded with all the frames before and after it that it depends on, whatever context
the windows have, and sound is given as soon as the frames after it are there: the joined stream is
the one-shot decode.

Pieces of different lengths run together. At the end of a stream the decoder sees zeros, which are
not what padding becomes in it: it is told how many frames are valid, and makes the others zero
layer by layer (see `vllm_omni.models.dac`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_omni.diffusion.programs.frames import RowBuffer
from vllm_omni.diffusion.rules import CallRules, Graphs, Ragged, RaggedOutput
from vllm_omni.framing import Stitcher
from vllm_omni.inputs import Window

PART = 236
"""Most frames that are heard of a call: its memory is bounded, and parts of long sounds are alike.
With those around them they are 256 of DAC's."""


def sound_rules(groups: int, hop: int) -> CallRules:
    """Of a decoder: codes int64 [b, groups, frames], lengths int64 [b] -> samples [b, n].

    Args:
        groups: Codes per frame.
        hop: Samples per frame.
    """

    def example(rows: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.zeros(rows, groups, frames, dtype=torch.int64)
        return codes, torch.full((rows,), frames)

    return CallRules(
        {"codes": Ragged(-1)},
        RaggedOutput(lambda frames: frames * hop),
        graphs=Graphs(example),
        to_host=True,
    )


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
        decode: Codes int64 [1, groups, frames] and their number int64 [1] -> samples [1, n]; all on
            the CPU, so that those of a batch go to the decoder's device at once.
        samples_per_frame: Waveform samples.
        reach: Of the decoder.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        samples_per_frame: int,
        reach: Reach,
    ) -> None:
        self._decode = decode
        self._reach = reach
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
        pieces = []
        while self._decoded < emit_to:
            until = min(emit_to, self._decoded + PART)
            seen = min(stop, until + self._reach.after)
            pieces.append(self._piece(seen, until, last and seen == stop))
        return torch.cat(pieces) if pieces else None

    @property
    def _decoded(self) -> int:
        """Frames all of whose samples have been given."""
        return self._stitcher.emitted // self._stitcher.samples_per_frame

    def _piece(self, stop: int, emit_to: int, last: bool) -> torch.Tensor:
        """The samples up to `emit_to`, of frames up to `stop`."""
        done = self._decoded
        start = max(0, done - self._reach.before)
        codes = self._codes.rows(start, stop).T[None]
        samples = self._decode(codes, torch.tensor([stop - start]))
        self._codes.forget(emit_to - self._reach.before)
        return self._stitcher.take(Window(start, stop, done, emit_to, last), samples[0])
