# SPDX-License-Identifier: Apache-2.0
"""Cutting a growing sequence of codec frames into decode windows, and joining what they decode to.

Two small pieces, one on each side of a decoder. `Windower` (upstream, in an edge) knows frames: it
says which frames to decode and which of them are new. `Stitcher` (downstream, in the program that
decodes) knows samples: it says which samples of a decoded window to append, so that the joined
stream equals the decode of the whole sequence in one go. No cross-fading is involved; it is exact
as far as the left context and the right holdback cover what a sample depends on.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from vllm_omni.errors import OmniConfigError
from vllm_omni.inputs import Window


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """How a stream is cut. All lengths are codec frames.

    Attributes:
        initial: New frames in the first window; small, so that the first sound is early.
        steady: New frames per window in the long run; large, so that decoding is efficient.
        left_context: Frames before the new ones that are decoded again (fewer at the start).
        right_holdback: Frames after the new ones that must be known before these are decoded
            (none at the end).
        ramp: Each chunk is this many times the one before until `steady`; `math.inf` goes to
            `steady` with the second one. Playback never runs dry while decoding and generating
            take less than 1 / `ramp` of real time.
        align: Chunks, left context and holdback are rounded up to multiples of this, so that every
            window starts and (but for the last one) ends on a block boundary of a blocked decoder.
    """

    initial: int
    steady: int
    left_context: int = 0
    right_holdback: int = 0
    ramp: float = 2.0
    align: int = 1

    def __post_init__(self) -> None:
        if min(self.initial, self.steady, self.align) < 1:
            raise OmniConfigError(f"initial, steady and align must be at least 1 frame: {self}")
        if min(self.left_context, self.right_holdback) < 0:
            raise OmniConfigError(f"left_context and right_holdback must not be negative: {self}")
        if not self.ramp > 1.0:
            raise OmniConfigError(f"ramp must be greater than 1, got {self.ramp}")

    @classmethod
    def one_shot(cls) -> Self:
        """The whole sequence in one window, once it has ended."""
        return cls(initial=sys.maxsize, steady=sys.maxsize)

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], default: Self | None = None) -> Self:
        """A policy from a connector's `extra` of the deploy YAML; other keys are left alone.

        Args:
            extra: May hold `initial_codec_chunk_frames`, `codec_chunk_frames`,
                `codec_left_context_frames`, `codec_right_holdback_frames`.
            default: What absent keys mean; by default 5, 25, 25 and 0 frames. If only one of the
                chunk sizes is given, the other one gives way to it.

        Raises:
            OmniConfigError: A value is no integer or out of range; names the key.
        """
        policy = default or cls(initial=5, steady=25, left_context=25)
        given = {
            field: _frames(extra[key], key, minimum)
            for key, (field, minimum) in _EXTRA_KEYS.items()
            if extra.get(key) is not None
        }
        policy = replace(policy, **given)
        if policy.initial > policy.steady:
            if "initial" in given and "steady" in given:
                raise OmniConfigError(
                    f"initial_codec_chunk_frames ({policy.initial}) must not exceed "
                    f"codec_chunk_frames ({policy.steady})"
                )
            smaller = (
                {"steady": policy.initial} if "initial" in given else {"initial": policy.steady}
            )
            policy = replace(policy, **smaller)
        return policy

    def chunk(self, index: int) -> int:
        """New frames of the `index`-th window (counted from 0)."""
        if self.initial >= self.steady or (index and math.isinf(self.ramp)):
            return self._aligned(self.steady)
        # The exponent is capped where `steady` has certainly been reached, so nothing overflows.
        reached = math.ceil(math.log(self.steady / self.initial, self.ramp)) + 1
        grown = self.initial * self.ramp ** min(index, reached) if index else self.initial
        return self._aligned(min(self.steady, math.floor(grown)))

    @property
    def context(self) -> int:
        """The left context, aligned."""
        return self._aligned(self.left_context)

    @property
    def holdback(self) -> int:
        """The right holdback, aligned."""
        return self._aligned(self.right_holdback)

    def _aligned(self, frames: int) -> int:
        return frames if self.align == 1 else -(-frames // self.align) * self.align


_EXTRA_KEYS = {
    "initial_codec_chunk_frames": ("initial", 1),
    "codec_chunk_frames": ("steady", 1),
    "codec_left_context_frames": ("left_context", 0),
    "codec_right_holdback_frames": ("right_holdback", 0),
}


def _frames(value: Any, key: str, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OmniConfigError(f"{key} must be a whole number of frames, got {value!r}")
    if value < minimum:
        raise OmniConfigError(f"{key} must be at least {minimum}, got {value}")
    return value


class Windower:
    """Turns the arrival of frames into decode windows; one per stream.

    The emitted ranges of all windows partition [0, frames) in order. Starts and stops never go
    back, so a decoder may forget the frames before the latest window's start.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self.policy = policy
        self.received = 0
        """Frames pushed so far."""
        self.emitted = 0
        """Frames that some window has contributed so far."""
        self._chunks = 0
        self._ended = False
        self._next_stop = self._stop_of_next()

    def _stop_of_next(self) -> int:
        """Frames that must be there for the next window, unless the stream ends."""
        return self.emitted + self.policy.chunk(self._chunks) + self.policy.holdback

    def push(self, n_new: int, final: bool = False) -> list[Window]:
        """Take `n_new` more frames and return the windows that can now be decoded, in order.

        With `final`, the last window takes all that remains. If everything had been emitted
        before (possible without holdback), there is none, and the stream is complete.
        """
        if self._ended:
            raise ValueError("frames were pushed after the final ones")
        if n_new < 0:
            raise ValueError(f"a negative number of frames was pushed: {n_new}")
        self.received += n_new
        self._ended = final
        windows: list[Window] = []
        if self.received < self._next_stop and not final:
            return windows
        while self.emitted < self.received:
            stop = self._next_stop
            last = final and stop >= self.received
            if stop > self.received and not last:
                break
            emit_to = self.received if last else stop - self.policy.holdback
            windows.append(
                Window(
                    start=max(0, self.emitted - self.policy.context),
                    stop=self.received if last else stop,
                    emit_from=self.emitted,
                    emit_to=emit_to,
                    last=last,
                )
            )
            self.emitted = emit_to
            self._chunks += 1
            self._next_stop = self._stop_of_next()
        return windows


class Stitcher:
    """Joins decoded windows to one stream; one per stream.

    Sample i of a decoded window is sample `window.start * samples_per_frame + i` of the stream. A
    decoder may give fewer samples than `samples_per_frame` per frame at its right end (causal
    transposed convolutions that trim there); the next window, which decodes these frames again as
    left context, then supplies them, and the joined length is that of the one-shot decode.
    """

    def __init__(self, samples_per_frame: int) -> None:
        self.samples_per_frame = samples_per_frame
        self.emitted = 0
        """Samples appended so far."""

    def take(self, window: Window, decoded: torch.Tensor) -> torch.Tensor:
        """The samples to append: a view of `decoded`.

        Args:
            window: The window that was decoded; windows come in order.
            decoded: [..., samples], any dtype.

        Raises:
            ValueError: The window starts after the end of what has been emitted.
        """
        origin = window.start * self.samples_per_frame
        end = origin + decoded.shape[-1]
        if not window.last:
            end = min(end, window.emit_to * self.samples_per_frame)
        if origin > self.emitted:
            raise ValueError(
                f"window [{window.start}, {window.stop}) leaves a gap: {self.emitted} samples are "
                f"emitted and it starts at {origin}; its left context is too short"
            )
        end = max(end, self.emitted)
        piece = decoded[..., self.emitted - origin : end - origin]
        self.emitted = end
        return piece
