# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the front door: who waits, who is sent away, and why."""

from vllm_omni.metrics.catalog import counter, declare_all, histogram
from vllm_omni.metrics.live import Reading, live_gauges


class OverloadMetrics:
    """What the front door reports."""

    def __init__(self) -> None:
        declare_all()
        self._requests = 0
        self._clients = 0
        self._worst_lag_s = 0.0
        live_gauges().watch(self)

    def gauges(self) -> Reading:
        """See `Watched`."""
        return {
            ("num_requests_waiting", ()): self._requests,
            ("num_clients_waiting", ()): self._clients,
            ("event_loop_lag_max_s", ()): self._worst_lag_s,
        }

    def waiting(self, requests: int, clients: int) -> None:
        """The queue has changed."""
        self._requests, self._clients = requests, clients

    def admitted(self, wait_s: float) -> None:
        """A request was admitted after so long a wait."""
        histogram("request_queue_wait_s").observe(wait_s)

    def rejected(self, reason: str = "queue_full") -> None:
        """A request was refused."""
        counter("requests_rejected").labels(reason).inc()

    def deadline_exceeded(self) -> None:
        """A request ran out of time."""
        counter("requests_deadline_exceeded").inc()

    def slow_client(self) -> None:
        """A request was given up because its client neither took nor sent anything."""
        counter("requests_slow_client").inc()

    def loop_lag(self, lag_s: float) -> None:
        """The server's event loop woke up so much later than it should have."""
        histogram("event_loop_lag_s").labels("api").observe(lag_s)
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
