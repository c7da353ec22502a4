# SPDX-License-Identifier: Apache-2.0
"""All Prometheus metrics of this project (REFERENCE.md 2.6), as data; vLLM's are beside them."""

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

from prometheus_client import Counter, Histogram

PREFIX = "vllm_omni:"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
SHORT_SECONDS = (0.00001, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
WAITS = (0.01, *SECONDS)
LAGS = (0.001, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 1, 2.5)
RATIO = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 4, 8)
BYTES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
EDGE = ("from_stage", "from_replica", "to_stage", "to_replica")

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """A metric. Gauges are read when they are asked for (`live.py`), the others are written.

    Attributes:
        name: Without the prefix; Prometheus adds `_total` to a counter's.
    """

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS


CATALOG: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # Requests.
        Metric("gauge", "num_requests_running", "Requests in any stage"),
        Metric("gauge", "num_requests_waiting", "Requests that wait to be let in"),
        Metric("gauge", "num_clients_waiting", "Clients whose requests wait"),
        Metric("histogram", "e2e_request_latency_s", "Arrival to last output"),
        Metric(
            "counter",
            "requests_success",
            "Requests that ended (`stop`) or whose client left (`abort`)",
            ("finished_reason",),
        ),
        Metric(
            "counter",
            "requests_failed",
            "Requests that failed, by whose fault it is: `client` or `server`",
            ("reason",),
        ),
        Metric("counter", "requests_rejected", "Requests refused with 429", ("reason",)),
        Metric("counter", "requests_deadline_exceeded", "Requests that took too long"),
        Metric("counter", "requests_slow_client", "Requests given up for a slow client"),
        Metric("counter", "prompt_tokens", "Tokens of prompts, in the first stage"),
        Metric("counter", "generation_tokens", "Tokens made by the first stage"),
        Metric("histogram", "request_queue_wait_s", "Arrival to being let in", (), WAITS),
        # Stages.
        Metric(
            "histogram",
            "stage_gen_time_s",
            "A request's time in a stage, submission to last output",
            ("stage", "stage_type"),
        ),
        Metric("gauge", "stage_waiting_requests", "Requests without an output of it", ("stage",)),
        Metric(
            "histogram",
            "stage_in_queue_s",
            "A request's wait in an autoregressive stage's engine before it is scheduled",
            ("stage",),
            SHORT_SECONDS,
        ),
        Metric("gauge", "stage_queue_depth", "Requests that a replica has", ("stage", "replica")),
        Metric("gauge", "stage_live_replicas", "Replicas that run", ("stage",)),
        Metric("counter", "replica_evictions", "Replicas taken out", ("stage",)),
        Metric("counter", "replica_respawns", "Replicas that came back", ("stage",)),
        Metric("counter", "request_retries", "Requests tried on another replica", ("stage",)),
        Metric(
            "histogram",
            "event_loop_lag_s",
            "How late a timer fires: `api` (HTTP, while requests run) or `orchestrator`",
            ("loop",),
            LAGS,
        ),
        Metric("gauge", "event_loop_lag_max_s", "The longest lag of `api` so far"),
        # Sound.
        Metric("histogram", "audio_ttfp_s", "Arrival to the first piece of sound"),
        Metric("histogram", "audio_duration_s", "Seconds of sound of a request"),
        Metric(
            "histogram",
            "audio_rtf",
            "Arrival to the last piece of sound, per second of sound",
            (),
            RATIO,
        ),
        Metric("counter", "audio_frames", "Samples of sound"),
        Metric(
            "histogram",
            "audio_underrun_s",
            "Longest silence for want of sound, if it is played from its first piece on",
            (),
            SHORT_SECONDS,
        ),
        Metric(
            "counter",
            "audio_continuity_ok",
            "Requests without a longer silence than that",
            ("threshold_ms",),
        ),
        Metric(
            "counter",
            "audio_skipped_requests",
            "Requests that asked for sound and got none",
            ("reason",),
        ),
        Metric("counter", "speech_stream_completed", "Requests whose sound came to its end"),
        Metric("counter", "speech_stream_aborted", "Requests whose sound was cut off"),
        # Transfers: sums over a request, per edge.
        Metric("histogram", "transfer_size_bytes", "Bytes over an edge", EDGE, BYTES),
        Metric("histogram", "transfer_tx_s", "Time in the sender's puts", EDGE, SHORT_SECONDS),
        Metric(
            "histogram",
            "transfer_rx_s",
            "Time in the receiver's gets, where that is a program or the client's side",
            EDGE,
            SHORT_SECONDS,
        ),
        Metric(
            "histogram",
            "transfer_in_flight_s",
            "From put to hand-over to the receiver, of an edge's first payload",
            EDGE,
            SHORT_SECONDS,
        ),
        Metric("gauge", "realtime_sessions", "Open sessions of `/v1/realtime`"),
        Metric("gauge", "speech_sessions", "Open sessions of `/v1/audio/speech/stream`"),
    )
}


_made: dict[str, Counter | Histogram] = {}
_making = threading.Lock()
"""Several threads may ask for a metric first, and Prometheus takes each only once."""


def counter(name: str) -> Counter:
    """A counter of the catalog; one per process, as Prometheus wants it."""
    metric = _declared(name, "counter")
    made = _once(name, lambda: Counter(PREFIX + name, metric.help, metric.labels))
    assert isinstance(made, Counter)
    return made


def histogram(name: str) -> Histogram:
    """A histogram of the catalog; one per process."""
    metric = _declared(name, "histogram")
    made = _once(
        name,
        lambda: Histogram(PREFIX + name, metric.help, metric.labels, buckets=metric.buckets),
    )
    assert isinstance(made, Histogram)
    return made


def _once(name: str, make: Callable[[], Counter | Histogram]) -> Counter | Histogram:
    if (made := _made.get(name)) is not None:
        return made
    with _making:
        if name not in _made:
            _made[name] = make()
        return _made[name]


def declare_all() -> None:
    """Make every counter and histogram exist, so that those without an event show as well."""
    for metric in CATALOG.values():
        if metric.kind == "counter":
            counter(metric.name)
        elif metric.kind == "histogram":
            histogram(metric.name)


def _declared(name: str, kind: Kind) -> Metric:
    metric = CATALOG[name]
    assert metric.kind == kind, f"{name} is a {metric.kind}"
    return metric
