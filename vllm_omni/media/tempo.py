# SPDX-License-Identifier: Apache-2.0
"""Sound played faster or slower at the same pitch."""

from fractions import Fraction

import av
import numpy as np
from av.filter import Graph

MIN_TEMPO, MAX_TEMPO = 0.25, 4.0
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
    if not MIN_TEMPO <= tempo <= MAX_TEMPO:
        raise ValueError(f"tempo should be {MIN_TEMPO} to {MAX_TEMPO}, not {tempo}")
    if tempo == 1.0 or not len(samples):
        return samples
    channels = samples.shape[1]
    layout = "mono" if channels == 1 else "stereo"
    graph = Graph()
    chain = [
        graph.add_abuffer(
            format="flt", sample_rate=rate, layout=layout, time_base=Fraction(1, rate)
        )
    ]
    while tempo < _LEAST_PER_FILTER:
        chain.append(graph.add("atempo", str(_LEAST_PER_FILTER)))
        tempo /= _LEAST_PER_FILTER
    chain += [
        graph.add("atempo", f"{tempo:.6f}"),
        graph.add("aformat", "sample_fmts=flt"),
        graph.add("abuffersink"),
    ]
    graph.link_nodes(*chain).configure()
    row = np.ascontiguousarray(samples, np.float32).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(row, format="flt", layout=layout)
    frame.sample_rate = rate
    frame.pts = 0
    frame.time_base = Fraction(1, rate)
    graph.push(frame)
    graph.push(None)
    pieces = []
    while True:
        try:
            pieces.append(graph.pull().to_ndarray().reshape(-1, channels))
        except (av.error.EOFError, av.error.BlockingIOError):
            break
    return np.concatenate(pieces) if pieces else samples
