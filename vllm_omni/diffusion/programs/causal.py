# SPDX-License-Identifier: Apache-2.0
"""Decoding a stream of codec frames by a causal transformer over frames and causal convolutions.

The transformer needs a long left context and is cheap, the convolutions need a short one and are
not. So they run apart, each over all the context that a frame depends on, whatever left context
the windows have: the joined stream is the one-shot decode.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_omni.diffusion.programs.frames import RowBuffer, check_codes
from vllm_omni.framing import Stitcher
from vllm_omni.inputs import Window


@dataclass(frozen=True, slots=True)
class CausalCodec:
    """What a stream's decoding has to know of a codec.

    Attributes:
        groups: Codes per frame.
        size: Codes are below this.
        samples_per_frame: Waveform samples.
        attention: Frames before a frame that its hidden state depends on, through all layers.
        convolution: Frames before a frame whose hidden states its samples depend on.
    """

    groups: int
    size: int
    samples_per_frame: int
    attention: int
    convolution: int


class CausalDecoding:
    """One stream; windows come in order.

    Args:
        codec: See there.
        encode: int64 [1, groups, frames] on `device` -> hidden states [1, frames, width].
        decode: Hidden states [1, frames, width] -> samples [1, n].
        device: Of the components.
        before: int [frames, groups] that come before the stream and are heard in none of it.
    """

    def __init__(
        self,
        codec: CausalCodec,
        encode: Callable[[torch.Tensor], torch.Tensor],
        decode: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        before: torch.Tensor | None = None,
    ) -> None:
        self._codec = codec
        self._encode = encode
        self._decode = decode
        self._device = device
        self._codes, self._hidden = RowBuffer(), RowBuffer()
        self._stitcher = Stitcher(codec.samples_per_frame)
        self._before = 0
        if before is not None and len(before):
            self._before = len(before)
            self._codes.append(before)
            self._hidden.start = max(0, self._before - codec.convolution)
            self._stitcher.emitted = self._before * codec.samples_per_frame

    def append(self, codes: torch.Tensor) -> None:
        """Add frames, int [n, groups]; those of windows are checked when these are decoded."""
        self._codes.append(codes)

    def __call__(self, window: Window) -> torch.Tensor:
        """The samples that the window appends to the stream.

        Raises:
            ValueError: Codes are not valid.
        """
        stop = self._before + window.stop
        self._extend_hidden(stop)
        start = max(self._hidden.start, self._decoded - self._codec.convolution)
        samples = self._stitcher.take(
            Window(
                start,
                stop,
                self._before + window.emit_from,
                self._before + window.emit_to,
                window.last,
            ),
            self._decode(self._hidden.rows(start, stop)[None])[0],
        )
        self._hidden.forget(self._decoded - self._codec.convolution)
        return samples

    @property
    def _decoded(self) -> int:
        """Frames all of whose samples have been given."""
        return self._stitcher.emitted // self._codec.samples_per_frame

    def _extend_hidden(self, stop: int) -> None:
        """Compute the hidden states of the frames before `stop`."""
        start = max(0, self._hidden.stop - self._codec.attention)
        codes = check_codes(self._codes.rows(start, stop), self._codec.groups, self._codec.size)
        states = self._encode(codes.T[None].to(self._device))
        self._hidden.append(states[0, self._hidden.stop - start :])
        self._codes.forget(self._hidden.stop - self._codec.attention)
