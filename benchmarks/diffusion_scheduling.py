# SPDX-License-Identifier: Apache-2.0
"""Latency of mixed image requests under load, by the order in which calls run. In virtual time.

    python benchmarks/diffusion_scheduling.py

The real scheduler decides, a simulator runs the clock: forward times recorded on an H200, Poisson
arrivals of 256, 512 and 1024 px images with 4 to 50 steps (`tests/diffusion/simulator.py`). The
figures are the same on every machine. The table goes into `docs/benchmarks.md` as well.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass

from common import ROOT, Report

sys.path.insert(0, str(ROOT))

from tests.diffusion.simulator import (
    SCHEDULERS,
    Request,
    percentile,
    poisson,
    simulate,
)

RATES = (1.0, 2.0, 3.0, 4.0)
"""Requests per second; from about 4.5 on, they come faster than the device can make them."""
DOCS = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- diffusion_scheduling.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Figures:
    """Of one scheduler at one rate.

    Attributes:
        mean_s: Mean latency.
        p99_s: 99th percentile of the latency.
        slowdown: Mean of latency / latency alone.
    """

    mean_s: float
    p99_s: float
    slowdown: float

    @classmethod
    def of(cls, requests: list[Request]) -> "Figures":
        latencies = [request.latency_s for request in requests]
        return cls(
            statistics.fmean(latencies),
            percentile(latencies, 99),
            statistics.fmean(request.latency_s / request.alone_s for request in requests),
        )


def measure(name: str, rate: float, count: int, seeds: int) -> Figures:
    """Figures over several random sequences of requests."""
    made = []
    for seed in range(seeds):
        requests = poisson(rate, count, seed)
        simulate(SCHEDULERS[name], requests, seed)
        made += requests
    return Figures.of(made)


def table(found: dict[tuple[str, float], Figures]) -> str:
    """A markdown table: mean, p99 and slowdown by order and rate."""
    head = "| order | " + " | ".join(f"{rate:g} a second" for rate in RATES) + " |\n"
    rows = [
        f"| {name} | "
        + " | ".join(
            f"{each.mean_s:.2f} s, {each.p99_s:.1f} s, {each.slowdown:.1f}x"
            for each in (found[name, rate] for rate in RATES)
        )
        + " |\n"
        for name in SCHEDULERS
    ]
    return head + "|---" * (len(RATES) + 1) + "|\n" + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500, help="per sequence")
    parser.add_argument("--seeds", type=int, default=4, help="sequences")
    options = parser.parse_args()
    report = Report("diffusion_scheduling")
    found = {
        (name, rate): measure(name, rate, options.requests, options.seeds)
        for rate in RATES
        for name in SCHEDULERS
    }
    for (name, rate), figures in found.items():
        note = f"p99 {figures.p99_s:.2f} s, slowdown {figures.slowdown:.2f}"
        report.add(f"mean latency, {rate:g}/s, {name}", figures.mean_s, "s", note=note)
        report.raw[f"{name}, {rate:g}/s"] = vars(figures)
    report.finish()
    markdown = table(found)
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(before + BEGIN + markdown + END + rest.partition(END)[2])
    print(markdown)


if __name__ == "__main__":
    main()
