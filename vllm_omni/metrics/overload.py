# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the front door: who waits, who is sent away, and why."""

import functools
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

_WAITS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
_LAGS = (0.001, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class _Families:
    waiting: Gauge
    waiting_clients: Gauge
    wait: Histogram
    rejected: Counter
    deadlines: Counter
    slow: Counter
    lag: Histogram
    worst_lag: Gauge


@functools.cache
def _families() -> _Families:
    """One set per process: Prometheus forbids a second metric of a name."""
    return _Families(
        waiting=Gauge("vllm_omni:num_requests_waiting", "Requests that wait to be admitted"),
        waiting_clients=Gauge("vllm_omni:num_clients_waiting", "Clients whose requests wait"),
        wait=Histogram(
            "vllm_omni:request_queue_wait_s", "Arrival to admission, seconds", buckets=_WAITS
        ),
        rejected=Counter("vllm_omni:requests_rejected", "Requests refused with 429"),
        deadlines=Counter("vllm_omni:requests_deadline_exceeded", "Requests that took too long"),
        slow=Counter("vllm_omni:requests_slow_client", "Requests given up for a slow client"),
        lag=Histogram(
            "vllm_omni:event_loop_lag_s",
            "How late the server's event loop wakes up while requests run, seconds",
            buckets=_LAGS,
        ),
        worst_lag=Gauge("vllm_omni:event_loop_lag_max_s", "The longest lag so far, seconds"),
    )


class OverloadMetrics:
    """What the front door reports."""

    def __init__(self) -> None:
        self._families = _families()
        self._worst_lag = 0.0

    def waiting(self, requests: int, clients: int) -> None:
        """The queue has changed."""
        self._families.waiting.set(requests)
        self._families.waiting_clients.set(clients)

    def admitted(self, wait_s: float) -> None:
        """A request was admitted after so long a wait."""
        self._families.wait.observe(wait_s)

    def rejected(self) -> None:
        """A request was refused."""
        self._families.rejected.inc()

    def deadline_exceeded(self) -> None:
        """A request ran out of time."""
        self._families.deadlines.inc()

    def slow_client(self) -> None:
        """A request was given up because its client neither took nor sent anything."""
        self._families.slow.inc()

    def loop_lag(self, lag_s: float) -> None:
        """The event loop woke up so much later than it should have."""
        self._families.lag.observe(lag_s)
        if lag_s > self._worst_lag:
            self._worst_lag = lag_s
            self._families.worst_lag.set(lag_s)
