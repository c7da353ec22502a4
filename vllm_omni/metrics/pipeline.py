# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the pipeline as a whole (REFERENCE.md 2.6, prefix `vllm_omni:`)."""

import functools
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)


@dataclass(frozen=True, slots=True)
class _Families:
    running: Gauge
    latency: Histogram
    success: Counter
    failed: Counter
    stage_time: Histogram


@functools.cache
def _families() -> _Families:
    """One set per process: Prometheus forbids a second metric of a name."""
    return _Families(
        running=Gauge("vllm_omni:num_requests_running", "Requests in any stage"),
        latency=Histogram(
            "vllm_omni:e2e_request_latency_s", "Arrival to last output", buckets=_SECONDS
        ),
        success=Counter(
            "vllm_omni:requests_success", "Requests that ended well", ["finished_reason"]
        ),
        failed=Counter("vllm_omni:requests_failed", "Requests that failed", ["reason"]),
        stage_time=Histogram(
            "vllm_omni:stage_gen_time_s",
            "A request's time in a stage, submission to last output",
            ["stage"],
            buckets=_SECONDS,
        ),
    )


class PipelineMetrics:
    """What the orchestrator reports about requests."""

    def __init__(self) -> None:
        self._families = _families()

    def started(self) -> None:
        """A request entered the pipeline."""
        self._families.running.inc()

    def finished(self, reason: str, latency_s: float, stage_times_s: dict[str, float]) -> None:
        """A request ended well or was aborted."""
        families = self._families
        families.running.dec()
        families.latency.observe(latency_s)
        families.success.labels(reason).inc()
        for stage, seconds in stage_times_s.items():
            families.stage_time.labels(stage).observe(seconds)

    def failed(self, status_code: int | None) -> None:
        """A request failed; the client's fault if the status says so."""
        self._families.running.dec()
        self._families.failed.labels("client" if status_code is not None else "server").inc()
