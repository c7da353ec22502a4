# SPDX-License-Identifier: Apache-2.0
"""How long a GPU was idle, from traces of torch's profiler.

    python benchmarks/trace_idle.py FOLDER

Each process that uses the GPU writes its own trace. Of every trace and of all together: the share
of time in which no kernel and no copy ran, between the first and the last one; how often and how
long; and how many kernels there were. A trace slows the host down, so idle time is an upper bound.
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
GAP_US = 100
"""From which a pause counts as one that the host made."""


def intervals(path: Path) -> np.ndarray:
    """When something ran on the device, float64 [n, 2], microseconds since the epoch of traces."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        trace = json.load(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    found = [
        (base + event["ts"], base + event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in ON_DEVICE
    ]
    return np.array(sorted(found), dtype=np.float64).reshape(-1, 2)


def idle(busy: np.ndarray) -> dict[str, Any]:
    """What the time between the intervals comes to.

    Args:
        busy: [n, 2], sorted by start; may overlap.
    """
    ends = np.maximum.accumulate(busy[:, 1])
    gaps = np.clip(busy[1:, 0] - ends[:-1], 0, None)
    span = ends[-1] - busy[0, 0]
    long = gaps[gaps > GAP_US]
    return {
        "span_s": span / 1e6,
        "kernels": len(busy),
        "idle": gaps.sum() / span,
        "idle_in_long_gaps": long.sum() / span,
        "long_gaps": len(long),
        "median_long_gap_us": float(np.median(long)) if len(long) else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    traces = {str(p.relative_to(args.folder)): intervals(p) for p in args.folder.rglob("*.json*")}
    traces = {name: busy for name, busy in traces.items() if len(busy)}
    figures = {name: idle(busy) for name, busy in traces.items()}
    if traces:
        every = np.concatenate(list(traces.values()))
        figures["all"] = idle(every[every[:, 0].argsort()])
    for name, figure in figures.items():
        print(name, {key: round(value, 4) for key, value in figure.items()})
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
