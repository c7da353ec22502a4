# SPDX-License-Identifier: Apache-2.0
"""Makes metrics, log lines and spans of what the orchestrator does.

Per output of a step it adds up a few numbers; everything else happens once per request.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.stats import RequestStateStats

from vllm_omni.config.pipeline import Pipeline
from vllm_omni.engine.messages import ErrorMessage, Submit
from vllm_omni.engine.observations import Seen, Transfer
from vllm_omni.engine.request_state import RequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.handles import TensorHandle
from vllm_omni.metrics.live import Reading
from vllm_omni.metrics.pipeline import PipelineMetrics, StageTime
from vllm_omni.metrics.sound import SoundMeter
from vllm_omni.outputs import AudioOutput, StageOutput, TokenOutput
from vllm_omni.tracing import RequestTrace

logger = init_logger(__name__)

CLIENT = "client"
_TRACE_HEADERS = "trace_headers"


class Observer:
    """Follows requests through the stages.

    Args:
        pipeline: The stages.
        pools: By stage.
        states: The live requests; the orchestrator's own mapping.
        metrics: Where counts go.
        log_requests: Log at INFO and not at DEBUG.
        tracing: Make spans.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pools: Mapping[str, StagePool],
        states: Mapping[str, RequestState],
        metrics: PipelineMetrics,
        *,
        log_requests: bool = False,
        tracing: bool = False,
    ) -> None:
        self._entry = pipeline.entry.name
        self._receiver = {edge.source: edge.target for edge in reversed(pipeline.edges)}
        self._sender = {edge.target: edge.source for edge in reversed(pipeline.edges)}
        self._pools = pools
        self._states = states
        self._metrics = metrics
        self._level = logging.INFO if log_requests else logging.DEBUG
        self._tracing = tracing
        metrics.watch(self)

    # Moments of a request.

    def begin(self, submit: Submit) -> Seen:
        """A request came."""
        seen = Seen()
        if "audio" in submit.modalities:
            seen.sound = SoundMeter(submit.arrival)
        if self._tracing:
            headers = submit.entry_kwargs.get(_TRACE_HEADERS)
            seen.trace = RequestTrace(submit.request_id, headers, submit.arrival)
        return seen

    def entered(
        self, state: RequestState, stage: str, replica: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """It is submitted to a stage; the keyword arguments to do that with."""
        logger.log(
            self._level, "Request %s goes to stage %s replica %d", state.request_id, stage, replica
        )
        if state.seen.trace is None:
            return kwargs
        return {**kwargs, _TRACE_HEADERS: state.seen.trace.enter(stage, replica)}

    def output(self, state: RequestState, stage: str, output: StageOutput, now: float) -> None:
        """A stage made something for it, which is handed on now (monotonic)."""
        seen = state.seen
        if isinstance(output, TokenOutput):
            for span in output.spans:
                self._handed(seen, stage, span.handle, now)
            if output.prompt_token_ids is not None and stage == self._entry:
                seen.prompt_tokens = len(output.prompt_token_ids)
        else:
            if output.payload is not None:
                self._handed(seen, stage, output.payload, now)
            source = seen.transfers.get(self._sender.get(stage, ""))
            if output.get_s and source is not None:
                source.received(output.get_s)
        if output.finished:
            self._left(state, stage, output)

    def sound(self, state: RequestState, stage: str, sound: AudioOutput, began: float) -> None:
        """A piece of sound goes to the client; reading it began then (monotonic)."""
        now = time.monotonic()
        seen = state.seen
        if seen.sound is not None:
            seen.sound.add(now, len(sound.samples), sound.sample_rate)
        if (transfer := seen.transfers.get(stage)) is not None:
            transfer.received(now - began)

    def ended(self, state: RequestState, reason: str) -> None:
        """It ended, by itself (`stop`) or because its client left (`abort`)."""
        latency = time.monotonic() - state.arrival
        logger.log(
            self._level, "Request %s ended (%s) after %.3f s", state.request_id, reason, latency
        )
        self._metrics.finished(reason, latency, self._stage_times(state))
        self._count_tokens(state)
        self._close(state, reason == "stop")
        if state.seen.trace is not None:
            state.seen.trace.end(reason)

    def failed(self, state: RequestState, message: ErrorMessage) -> None:
        """It failed."""
        logger.log(self._level, "Request %s failed: %s", state.request_id, message.error)
        self._metrics.failed(message.status_code)
        self._close(state, False)
        if state.seen.trace is not None:
            state.seen.trace.end("failed", message.error)

    def retried(self, state: RequestState) -> None:
        """It starts over, as a new request."""
        if state.seen.trace is not None:
            state.seen.trace.end("retried")

    # Gauges, read from any thread: a list of a mapping is made in one piece.

    def gauges(self) -> Reading:
        """See `Watched`."""
        states = list(self._states.values())
        read: Counter[tuple[str, tuple[str, ...]]] = Counter()
        read["num_requests_running", ()] = len(states)
        for name, pool in self._pools.items():
            read["stage_waiting_requests", (name,)] = 0
            read["stage_live_replicas", (name,)] = pool.live_num_replicas
            for replica_id, load in pool.loads.items():
                read["stage_queue_depth", (name, str(replica_id))] = load
        for state in states:
            for stage, times in list(state.times.items()):
                read["stage_waiting_requests", (stage,)] += times.first_output is None
        return read

    # Details.

    def _handed(self, seen: Seen, stage: str, handle: TensorHandle, now: float) -> None:
        transfer = seen.transfers.get(stage)
        if transfer is None:
            # A connector that does not say when a payload was put has handed it on at once.
            transfer = seen.transfers[stage] = Transfer(handle.put_at or now, now)
        transfer.add(now, handle)

    def _left(self, state: RequestState, stage: str, output: StageOutput) -> None:
        queue = _queue(output)
        if queue is not None:
            state.seen.queues[stage] = queue
        if state.seen.trace is not None:
            state.seen.trace.leave(stage, state.times[stage].tokens, queue)

    def _stage_times(self, state: RequestState) -> Sequence[StageTime]:
        made = []
        for name, times in state.times.items():
            if times.finished is None:
                continue
            queue = state.seen.queues.get(name)
            made.append(
                StageTime(
                    name,
                    state.needed[name].engine,
                    times.finished - times.submitted,
                    None if queue is None else queue[1] - queue[0],
                )
            )
        return made

    def _count_tokens(self, state: RequestState) -> None:
        times = state.times.get(self._entry)
        if times is None:
            return
        self._metrics.tokens(state.seen.prompt_tokens, times.tokens)

    def _close(self, state: RequestState, completed: bool) -> None:
        seen = state.seen
        if seen.sound is not None:
            self._metrics.sound(seen.sound, completed)
        for source, transfer in seen.transfers.items():
            target = self._receiver.get(source, CLIENT)
            in_flight = transfer.first_handed - transfer.first_put
            edge = (source, _replica(state, source), target, _replica(state, target))
            self._metrics.transferred(
                edge, transfer.nbytes, transfer.tx_s, in_flight, transfer.rx_s
            )
            if seen.trace is not None:
                times = (transfer.first_put, transfer.last_handed)
                seen.trace.transfer(source, target, times, transfer.nbytes)


def _replica(state: RequestState, stage: str) -> str:
    times = state.times.get(stage)
    return "0" if times is None else str(times.replica)


def _queue(output: StageOutput) -> tuple[float, float] | None:
    """When an AR engine got the request and when it scheduled it, if it keeps statistics."""
    if not isinstance(output, TokenOutput) or output.output is None:
        return None
    stats = output.output.metrics
    if not isinstance(stats, RequestStateStats) or not stats.scheduled_ts:
        return None
    return stats.queued_ts, stats.scheduled_ts
