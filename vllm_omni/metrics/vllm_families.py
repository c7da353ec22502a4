# SPDX-License-Identifier: Apache-2.0
"""vLLM's metrics for many engines in one process: `engine` becomes `stage` and `replica`.

vLLM makes its metrics anew for every engine and takes those of the one before out of Prometheus's
registry. So they live in a registry of their own here, which is registered as one collector; each
is made once and shared by all stages.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_ENGINE = "engine"
_PLACE = ("stage", "replica")
_RENAMED = {"stage": "phase"}
"""A label of vLLM's own that is called like one of ours."""

AnyMetric = Counter | Gauge | Histogram


class _SharedMetrics(Collector):
    """vLLM's metrics, each made once."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, AnyMetric] = {}
        self._lock = threading.Lock()

    def get(
        self, kind: type[AnyMetric], name: str, help: str, labels: tuple[str, ...], **options: Any
    ) -> AnyMetric:
        with self._lock:  # replicas are started from several threads
            if name not in self._metrics:
                made = kind(name, help, labels, registry=self._registry, **options)
                self._metrics[name] = made
            return self._metrics[name]

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        return iter(self._registry.collect())


_SHARED = _SharedMetrics()
REGISTRY.register(_SHARED)


class StageMetric:
    """A metric as vLLM sees it for one replica: it labels by engine, we by place."""

    def __init__(self, metric: AnyMetric, labels: tuple[str, ...], place: tuple[str, str]) -> None:
        self._metric = metric
        self._labels = labels
        self._place = place

    def labels(self, *values: Any, **named: Any) -> Any:
        """The child for vLLM's labels."""
        given = dict(zip(self._labels, values, strict=False)) | named
        engine = str(given.pop(_ENGINE, "0"))
        stage, replica = self._place
        # Several engines in a replica (data parallelism) are told apart.
        given_place = (stage, replica if engine in ("", "0") else f"{replica}.{engine}")
        renamed = {_RENAMED.get(name, name): value for name, value in given.items()}
        return self._metric.labels(**renamed, **dict(zip(_PLACE, given_place, strict=True)))


def stage_metric(
    kind: type[AnyMetric],
    place: tuple[str, str],
    name: str,
    documentation: str = "",
    labelnames: Iterable[str] = (),
    **options: Any,
) -> StageMetric | AnyMetric:
    """What vLLM gets when it makes a metric; the arguments are Prometheus's.

    Args:
        kind: `Counter`, `Gauge` or `Histogram`.
        place: Stage and replica.
    """
    labels = tuple(labelnames)
    if _ENGINE not in labels:
        return _SHARED.get(kind, name, documentation, labels, **options)
    ours = tuple(_RENAMED.get(label, label) for label in labels if label != _ENGINE)
    metric = _SHARED.get(kind, name, documentation, (*ours, *_PLACE), **options)
    return StageMetric(metric, labels, place)
