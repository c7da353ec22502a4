# SPDX-License-Identifier: Apache-2.0
"""Where requests spent their time, stage by stage, by the server's own metrics.

The table is the difference of two looks at `/metrics`, so it holds whatever else the server did in
between. Quantiles lie within a histogram's bucket, as those of Prometheus do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

TIME = "vllm_omni:stage_gen_time_s"
"""A request's time in a stage, from submission to its last output."""


@dataclass
class StageTimes:
    """A histogram of one stage.

    Attributes:
        count: Requests.
        total_s: Of all of them.
        buckets: How many requests took at most so many seconds, by these.
    """

    count: float = 0.0
    total_s: float = 0.0
    buckets: dict[float, float] = field(default_factory=dict)

    def since(self, before: "StageTimes") -> "StageTimes":
        """What was added since an earlier look."""
        return StageTimes(
            self.count - before.count,
            self.total_s - before.total_s,
            {le: n - before.buckets.get(le, 0.0) for le, n in self.buckets.items()},
        )

    def quantile(self, part: float) -> float:
        """Seconds that this part of the requests took at most, assumed even within a bucket."""
        wanted, low, below = part * self.count, 0.0, 0.0
        for high, count in sorted(self.buckets.items()):
            if count >= wanted:
                if math.isinf(high) or count == below:
                    return low
                return low + (high - low) * (wanted - below) / (count - below)
            low, below = high, count
        return low


Stages = Mapping[str, StageTimes]


async def look(session: aiohttp.ClientSession, base_url: str) -> Stages | None:
    """The stages' times so far; None where there is no `/metrics`."""
    async with session.get(f"{base_url}/metrics") as response:
        if response.status != 200:
            return None
        return read(await response.text())


def read(text: str) -> dict[str, StageTimes]:
    """The histograms in a page of metrics, by stage."""
    stages: dict[str, StageTimes] = {}
    for family in text_string_to_metric_families(text):
        if family.name != TIME:
            continue
        for sample in family.samples:
            times = stages.setdefault(sample.labels["stage"], StageTimes())
            if sample.name.endswith("_sum"):
                times.total_s += sample.value
            elif sample.name.endswith("_count"):
                times.count += sample.value
            elif sample.name.endswith("_bucket"):
                times.buckets[float(sample.labels["le"])] = sample.value
    return stages


def between(before: Stages, after: Stages) -> dict[str, StageTimes]:
    """What each stage did in between; stages without a request are left out."""
    added = {name: times.since(before.get(name, StageTimes())) for name, times in after.items()}
    return {name: times for name, times in added.items() if times.count > 0}


def fields(stages: Stages) -> dict[str, dict[str, float]]:
    """For the result."""
    return {
        "stage_requests": {name: times.count for name, times in stages.items()},
        "stage_durations_mean": {n: t.total_s / t.count for n, t in stages.items()},
        "stage_durations_p50": {n: t.quantile(0.5) for n, t in stages.items()},
        "stage_durations_p99": {n: t.quantile(0.99) for n, t in stages.items()},
    }
