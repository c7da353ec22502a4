# SPDX-License-Identifier: Apache-2.0
"""Gauges that are read when Prometheus asks, so that they cost a request nothing."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_omni.metrics.catalog import CATALOG, PREFIX

Reading = Mapping[tuple[str, tuple[str, ...]], float]
"""Values by (name in the catalog, label values)."""


class Watched(Protocol):
    """What has gauges. It is asked from any thread."""

    def gauges(self) -> Reading:
        """The values now."""


class LiveGauges(Collector):
    """The gauges of the catalog, summed over everything that is watched and still exists."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()

    def watch(self, watched: Watched) -> None:
        """Read its gauges from now on, as long as it lives."""
        self._watched.add(watched)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the gauges need not be read to be registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read all."""
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for watched in list(self._watched):
            total.update(watched.gauges())
        for metric in CATALOG.values():
            if metric.kind != "gauge":
                continue
            family = GaugeMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
            for (name, labels), value in total.items():
                if name == metric.name:
                    family.add_metric(labels, value)
            yield family


_GAUGES = LiveGauges()
REGISTRY.register(_GAUGES)


def live_gauges() -> LiveGauges:
    """The process's own."""
    return _GAUGES
