# SPDX-License-Identifier: Apache-2.0
"""A picture of latency and throughput over load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni.benchmarks.figures import FIGURES
from vllm_omni.benchmarks.options import Load
from vllm_omni.benchmarks.outputs import OmniOutput

DRAWN = ("audio_ttfp", "audio_playable")
"""Figures that are drawn beside the time to the first token and the whole latency."""
THROUGHPUTS = {
    "request_throughput": "requests/s",
    "output_throughput": "tokens/s",
    "audio_throughput": "s of sound/s",
    "image_throughput": "images/s",
    "video_throughput": "videos/s",
}
TAIL = 95


@dataclass(frozen=True)
class Level:
    """One run.

    Attributes:
        load: Its load.
        latencies: Median and 95th percentile in ms, by what they are of.
        throughputs: By what they are of.
    """

    load: Load
    latencies: Mapping[str, tuple[float, float]]
    throughputs: Mapping[str, float]


def level_of(load: Load, result: Mapping[str, Any], outputs: Sequence[OmniOutput]) -> Level:
    """What is drawn of a run; of a run in which all failed, nothing."""
    seconds = {"First token": result.get("ttfts", ()), "Whole answer": result["latencies"]}
    values = {name: [1e3 * each for each in found if each] for name, found in seconds.items()}
    completed = [output for output in outputs if output.success]
    if outputs:
        values["Whole answer"] = [1e3 * output.latency for output in completed]
    for figure in FIGURES:
        if figure.name in DRAWN:
            values[figure.title] = figure.values(completed)
    return Level(
        load,
        {
            name: (float(np.median(each)), float(np.percentile(each, TAIL)))
            for name, each in values.items()
            if each and result["completed"]
        },
        {label: result[name] for name, label in THROUGHPUTS.items() if name in result},
    )


def draw(levels: Sequence[Level], path: Path, title: str) -> None:
    """Draw the runs into a PNG; matplotlib is there (`saving.check`).

    Raises:
        OSError: It cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    ticks = range(len(levels))
    for name in dict.fromkeys(name for level in levels for name in level.latencies):
        points = [
            (i, *level.latencies[name]) for i, level in enumerate(levels) if name in level.latencies
        ]
        at, medians, tails = zip(*points, strict=True)
        (line,) = above.plot(at, medians, marker="o", label=f"{name}, median")
        above.plot(at, tails, "--", marker=".", color=line.get_color(), label=f"{name}, p{TAIL}")
    for name in dict.fromkeys(name for level in levels for name in level.throughputs):
        values = [level.throughputs.get(name, 0.0) for level in levels]
        below.plot(ticks, values, marker="o", label=name)
    above.set(title=title, ylabel="ms", yscale="log")
    below.set(xlabel="load", ylabel="throughput")
    below.set_xticks(ticks, [str(level.load) for level in levels])
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
