# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator and the servers report to Prometheus (REFERENCE.md 2.6)."""

from typing import NamedTuple

from vllm_omni.metrics.catalog import counter, declare_all, histogram
from vllm_omni.metrics.live import Watched, live_gauges
from vllm_omni.metrics.sound import SoundMeter

CONTINUITY_S = 0.1
"""A longer silence is heard."""


class StageTime(NamedTuple):
    """A request's way through one stage, in seconds."""

    stage: str
    stage_type: str
    total_s: float
    in_queue_s: float | None


class PipelineMetrics:
    """Counts and times. One per orchestrator; the metrics are the process's."""

    def __init__(self) -> None:
        declare_all()

    def watch(self, watched: Watched) -> None:
        """Have its gauges read at every scrape."""
        live_gauges().watch(watched)

    # Requests.

    def finished(self, reason: str, latency_s: float, stages: list[StageTime]) -> None:
        """A request ended well or was aborted."""
        histogram("e2e_request_latency_s").observe(latency_s)
        counter("requests_success").labels(reason).inc()
        for stage in stages:
            histogram("stage_gen_time_s").labels(stage.stage, stage.stage_type).observe(
                stage.total_s
            )
            if stage.in_queue_s is not None:
                histogram("stage_in_queue_s").labels(stage.stage).observe(stage.in_queue_s)

    def tokens(self, prompt: int, generated: int) -> None:
        """What the entry stage has done for a request that ended."""
        counter("prompt_tokens").inc(prompt)
        counter("generation_tokens").inc(generated)

    def failed(self, status_code: int | None) -> None:
        """A request failed; the client's fault if the status says so."""
        counter("requests_failed").labels("client" if status_code is not None else "server").inc()

    # Replicas.

    def evicted(self, stage: str) -> None:
        """A replica was taken out."""
        counter("replica_evictions").labels(stage).inc()

    def respawned(self, stage: str) -> None:
        """A replica came back."""
        counter("replica_respawns").labels(stage).inc()

    def retried(self, stage: str) -> None:
        """A request is tried on another replica."""
        counter("request_retries").labels(stage).inc()

    # The loop.

    def loop_lag(self, seconds: float) -> None:
        """A timer of the orchestrator's event loop fired that much too late."""
        histogram("event_loop_lag_s").labels("orchestrator").observe(max(0.0, seconds))

    # Sound and transfers.

    def sound(self, meter: SoundMeter, completed: bool) -> None:
        """The sound of a request that ended."""
        if meter.first is None:
            if completed:
                counter("audio_skipped_requests").labels("silent").inc()
            return
        name = "speech_stream_completed" if completed else "speech_stream_aborted"
        counter(name).inc()
        counter("audio_frames").inc(meter.frames)
        histogram("audio_ttfp_s").observe(meter.first - meter.arrival)
        histogram("audio_duration_s").observe(meter.seconds)
        histogram("audio_underrun_s").observe(meter.underrun_s)
        if meter.underrun_s <= CONTINUITY_S:
            counter("audio_continuity_ok").labels(f"{CONTINUITY_S * 1000:.0f}").inc()
        if completed and meter.seconds:
            histogram("audio_rtf").observe((meter.last - meter.arrival) / meter.seconds)

    def transferred(
        self,
        edge: tuple[str, str, str, str],
        nbytes: int,
        tx_s: float,
        in_flight_s: float,
        rx_s: float | None,
    ) -> None:
        """All that went over an edge for one request.

        Args:
            edge: Source stage and replica, target stage and replica.
            nbytes: Size.
            tx_s: Time in the sender's puts.
            in_flight_s: From the first put to its hand-over.
            rx_s: Time in the receiver's gets, if it says so.
        """
        histogram("transfer_size_bytes").labels(*edge).observe(nbytes)
        histogram("transfer_tx_s").labels(*edge).observe(tx_s)
        histogram("transfer_in_flight_s").labels(*edge).observe(in_flight_s)
        if rx_s is not None:
            histogram("transfer_rx_s").labels(*edge).observe(rx_s)
