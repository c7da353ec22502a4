# SPDX-License-Identifier: Apache-2.0
"""Sound played faster or slower at the same pitch."""

from fractions import Fraction

import av
import numpy as np
from av.filter import Graph

MIN_TEMPO, MAX_TEMPO = 0.25, 4.0
BLOCK = 1024
"""Samples that go into the filters at once: what they make depends a little on that."""
_LEAST_PER_FILTER = 0.5  # FFmpeg's own limit


def with_tempo(samples: np.ndarray, rate: int, tempo: float) -> np.ndarray:
    """The sound `tempo` times as fast; as it is, if it is too short for that to be heard.

    Args:
        samples: float32 ``[n, channels]``, 1 or 2 channels.
        rate: Hz.
        tempo: `MIN_TEMPO` to `MAX_TEMPO`.

    Raises:
        ValueError: `tempo` is out of range.
    """
    if tempo == 1.0 or not len(samples):
        return samples
    stream = TempoStream(rate, tempo, samples.shape[1])
    made = np.concatenate([stream.feed(samples), stream.finish()])
    return made if len(made) else samples


class TempoStream:
    """Sound that comes in pieces, `tempo` times as fast.

    The joined pieces are what `with_tempo` makes of the whole. Not for use by two threads at once.

    Args:
        rate: Hz.
        tempo: `MIN_TEMPO` to `MAX_TEMPO`.
        channels: 1 or 2.

    Raises:
        ValueError: `tempo` is out of range.
    """

    def __init__(self, rate: int, tempo: float, channels: int = 1) -> None:
        if not MIN_TEMPO <= tempo <= MAX_TEMPO:
            raise ValueError(f"tempo should be {MIN_TEMPO} to {MAX_TEMPO}, not {tempo}")
        self._rate = rate
        self._channels = channels
        self._layout = "mono" if channels == 1 else "stereo"
        self._position = 0
        self._waiting = np.zeros((0, channels), np.float32)
        self._graph = Graph()
        chain = [
            self._graph.add_abuffer(
                format="flt", sample_rate=rate, layout=self._layout, time_base=Fraction(1, rate)
            )
        ]
        while tempo < _LEAST_PER_FILTER:
            chain.append(self._graph.add("atempo", str(_LEAST_PER_FILTER)))
            tempo /= _LEAST_PER_FILTER
        chain += [
            self._graph.add("atempo", f"{tempo:.6f}"),
            self._graph.add("aformat", "sample_fmts=flt"),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*chain).configure()

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Add float32 ``[n, channels]``; what is ready by now, perhaps nothing."""
        waiting = np.concatenate([self._waiting, samples])
        whole = len(waiting) - len(waiting) % BLOCK
        for start in range(0, whole, BLOCK):
            self._push(waiting[start : start + BLOCK])
        self._waiting = waiting[whole:]
        return self._ready()

    def finish(self) -> np.ndarray:
        """The rest."""
        if len(self._waiting):
            self._push(self._waiting)
        self._graph.push(None)
        return self._ready()

    def _push(self, samples: np.ndarray) -> None:
        row = np.ascontiguousarray(samples, np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(row, format="flt", layout=self._layout)
        frame.sample_rate = self._rate
        frame.pts = self._position
        frame.time_base = Fraction(1, self._rate)
        self._position += len(samples)
        self._graph.push(frame)

    def _ready(self) -> np.ndarray:
        pieces = [np.zeros((0, self._channels), np.float32)]
        while True:
            try:
                pieces.append(self._graph.pull().to_ndarray().reshape(-1, self._channels))
            except (av.error.EOFError, av.error.BlockingIOError):
                return np.concatenate(pieces)
