# SPDX-License-Identifier: Apache-2.0
"""How long a GPU was idle, from traces of torch's profiler.

    python benchmarks/trace_idle.py FOLDER

Each process that uses the GPU writes its own trace. Of every trace and of all together: the share
of time in which no kernel and no copy ran, between the first and the last one; how often and how
long; how many kernels there were; and before which of them the device paused. A trace slows the
host down, so idle time is an upper bound.
"""

import argparse
import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
GAP_US = 100
"""From which a pause counts as one that the host made."""


NAMED = 6
"""Kernels that are told of."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What ran on the device, in the order of its start.

    Attributes:
        busy: float64 [n, 2], start and end, in microseconds since the epoch of traces.
        names: Of the n kernels and copies.
    """

    busy: np.ndarray
    names: list[str]


def read(path: Path) -> Trace:
    """A file of torch's profiler."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        trace = json.load(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    found = sorted(
        (base + event["ts"], base + event["ts"] + event["dur"], event["name"])
        for event in trace["traceEvents"]
        if event.get("cat") in ON_DEVICE
    )
    busy = np.array([each[:2] for each in found], dtype=np.float64).reshape(-1, 2)
    return Trace(busy, [name for _, _, name in found])


def together(traces: list[Trace]) -> Trace:
    """Several processes' as one."""
    busy = np.concatenate([trace.busy for trace in traces])
    names = [name for trace in traces for name in trace.names]
    order = busy[:, 0].argsort()
    return Trace(busy[order], [names[i] for i in order])


def idle(trace: Trace) -> dict[str, Any]:
    """What the time between the intervals, which may overlap, comes to."""
    busy = trace.busy
    ends = np.maximum.accumulate(busy[:, 1])
    gaps = np.clip(busy[1:, 0] - ends[:-1], 0, None)
    span = ends[-1] - busy[0, 0]
    is_long = gaps > GAP_US
    long = gaps[is_long]
    paused: dict[str, list[float]] = defaultdict(list)
    for i in np.flatnonzero(is_long):
        paused[trace.names[i + 1][:60]].append(float(gaps[i]))
    most = sorted(paused.items(), key=lambda each: -sum(each[1]))[:NAMED]
    return {
        "span_s": span / 1e6,
        "kernels": len(busy),
        "idle": gaps.sum() / span,
        "idle_in_long_gaps": long.sum() / span,
        "long_gaps": len(long),
        "median_long_gap_us": float(np.median(long)) if len(long) else 0.0,
        "before": {name: (len(each), sum(each) / span) for name, each in most},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    traces = {str(p.relative_to(args.folder)): read(p) for p in args.folder.rglob("*.json*")}
    traces = {name: trace for name, trace in traces.items() if trace.names}
    figures = {name: idle(trace) for name, trace in traces.items()}
    if traces:
        figures["all"] = idle(together(list(traces.values())))
    for name, figure in figures.items():
        before = figure.pop("before")
        print(name, {key: round(float(value), 4) for key, value in figure.items()})
        for kernel, (count, share) in before.items():
            print(f"    {count} pauses, {share:.1%} of the time, before {kernel}")
        figure["before"] = before
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
