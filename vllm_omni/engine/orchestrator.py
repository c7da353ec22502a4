# SPDX-License-Identifier: Apache-2.0
"""The orchestrator: routes every request through the stages that it needs.

It runs in a thread and event loop of its own, so that nothing in a caller's loop delays a stage. It
holds no model knowledge and touches no tensor: a stage's output goes to the client, and over the
request's edges to the next stages. One task per replica waits for that replica's next engine step
and settles the whole step at once: one queue operation to the caller, one message per downstream
replica.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

import janus
import msgspec
from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.pipeline import EdgeContext, EdgeState
from vllm_omni.connectors.base import OmniConnector
from vllm_omni.engine import failures
from vllm_omni.engine.attempts import Attempts
from vllm_omni.engine.client_outputs import client_output, made_modality, mark_last
from vllm_omni.engine.messages import (
    Abort,
    Call,
    CallResult,
    Command,
    Emit,
    ErrorMessage,
    Message,
    Shutdown,
    Submit,
)
from vllm_omni.engine.observer import Observer
from vllm_omni.engine.recovery import Recovery, watch_for_hang
from vllm_omni.engine.request_state import RequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.topology import Topology
from vllm_omni.errors import (
    OmniClientError,
    StageUnavailableError,
)
from vllm_omni.inputs import StageInput
from vllm_omni.metrics.pipeline import PipelineMetrics
from vllm_omni.outputs import StageOutput
from vllm_omni.replica import StageReplica

logger = init_logger(__name__)

HEALTH_INTERVAL_S = 0.5


class Orchestrator:
    """Routes requests through the pools of a pipeline's stages.

    Args:
        topology: What is deployed.
        pools: One per stage, in stage order.
        connector: Reads what final stages made, and frees what released requests left.
        inbox: Commands from the caller.
        outbox: Lists of messages to the caller, one list per settled step.
    """

    def __init__(
        self,
        topology: Topology,
        pools: Sequence[StagePool],
        connector: OmniConnector,
        inbox: janus.AsyncQueue[Command],
        outbox: janus.SyncQueue[list[Message]],
    ) -> None:
        self._topology = topology
        self._pipeline = topology.pipeline
        self._pools = {pool.stage.name: pool for pool in pools}
        self._connector = connector
        self._inbox = inbox
        self._outbox = outbox
        self._states: dict[str, RequestState] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics = PipelineMetrics()
        self._attempts = Attempts()
        self._recovery = Recovery(topology.reliability)
        self._observer = Observer(
            topology.pipeline,
            self._pools,
            self._states,
            self._metrics,
            log_requests=topology.log_requests,
            tracing=topology.tracing,
        )

    async def run(self) -> None:
        """Serve until a `Shutdown` arrives; then every pool has been shut down."""
        for name, pool in self._pools.items():
            for replica_id in pool.live_replica_ids:
                self._attend(name, replica_id)
        self._spawn(self._watch_health())
        timeout: float | None = None
        try:
            timeout = await self._serve_commands()
        finally:
            logger.info("[Orchestrator] Received shutdown signal")
            await self._close(timeout)

    def _attend(self, stage: str, replica_id: int) -> None:
        """Begin to take a replica's outputs, and to notice its death."""
        replica = self._pools[stage].replica(replica_id)
        self._spawn(self._poll(stage, replica_id, replica))
        self._spawn(self._watch_for_hang(stage, replica_id, replica))

    async def _close(self, timeout: float | None) -> None:
        self._recovery.close()
        for request_id in list(self._states):
            self._fail(request_id, "the server is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Plain threads: at interpreter exit there are no executors to be had.
        ends = [
            threading.Thread(target=pool.shutdown, args=(timeout,)) for pool in self._pools.values()
        ]
        for end in ends:
            end.start()
        for pool, end in zip(self._pools.values(), ends, strict=True):
            end.join()
            logger.info("[StagePool] Stage %d shut down", pool.stage_id)
        self._connector.close()

    # Commands.

    async def _serve_commands(self) -> float | None:
        while True:
            match await self._inbox.get():
                case Submit() as submit:
                    self._add_request(submit)
                case Abort(request_ids):
                    await self._abort([self._attempts.current(each) for each in request_ids])
                case Call() as call:
                    self._spawn(self._call(call))
                case Shutdown(timeout):
                    return timeout

    def _add_request(self, submit: Submit) -> None:
        """Take a request in: an abort that follows finds it, however little has happened."""
        entry, *_ = self._pipeline.needed_stages(submit.modalities)
        pool = self._pools[entry.name]
        if pool.live_num_replicas == 0:
            self._send([failures.unavailable(submit.request_id, pool.stage_id)])
            return
        try:
            state = self._new_state(submit)
        except Exception as error:  # An edge's fault must not reach the other requests.
            self._fail_with(submit.request_id, error, pool.stage_id)
            return
        self._states[submit.request_id] = state
        self._spawn(self._enter(state, entry.name, submit.prompt, **submit.entry_kwargs))

    def _new_state(self, submit: Submit) -> RequestState:
        needed = {stage.name: stage for stage in self._pipeline.needed_stages(submit.modalities)}
        edges: dict[str, list[tuple[str, EdgeState]]] = {}
        for edge in self._pipeline.edges:
            if edge.source in needed and edge.target in needed:
                context = EdgeContext(
                    model=self._topology.model,
                    config=self._topology.config,
                    voice=submit.voice,
                    streaming=self._topology.streaming,
                    extra=self._topology.edge_extra.get((edge.source, edge.target), {}),
                    beside=submit.beside,
                    initial_frames=submit.initial_frames,
                )
                edges.setdefault(edge.source, []).append((edge.target, edge.start(context)))
        entry_params = submit.params[self._pipeline.stage_id(self._pipeline.entry.name)]
        kind = (
            entry_params.output_kind
            if isinstance(entry_params, SamplingParams)
            else RequestOutputKind.DELTA
        )
        return RequestState(
            request_id=submit.request_id,
            needed=needed,
            params=submit.params,
            modalities=submit.modalities,
            voice=submit.voice,
            arrival=submit.arrival,
            edges=edges,
            text_kind=kind if edges else RequestOutputKind.DELTA,
            submit=submit,
            seen=self._observer.begin(submit),
        )

    async def _enter(self, state: RequestState, stage: str, prompt: Any, **kwargs: Any) -> None:
        """Submit a request to a stage; whatever goes wrong is this request's failure."""
        pool = self._pools[stage]
        request_id = state.request_id
        if request_id not in self._states:
            return
        try:
            replica_id = pool.bind(request_id)
            replica = pool.replica(replica_id)
            state.submitted_to(stage, replica_id)
            kwargs = self._observer.entered(state, stage, replica_id, kwargs)
            await pool.submit(
                request_id,
                prompt,
                state.params[pool.stage_id],
                emit=state.feeds_others(stage),
                **kwargs,
            )
            if request_id not in self._states:
                # Its abort may have come before the replica knew of it.
                await replica.abort([request_id])
        except StageUnavailableError:
            self._finish_with([failures.unavailable(request_id, pool.stage_id)])
        except EngineDeadError as error:
            await self._replica_died(stage, replica_id, replica, error)
            self._lose([request_id], pool, error)
        except Exception as error:  # Any other failure to start belongs to this request alone.
            self._fail_with(request_id, error, pool.stage_id)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (state := self._states.pop(request_id, None)) is not None:
                self._observer.ended(state, "abort")
                await self._release(state)

    async def _call(self, call: Call) -> None:
        try:
            results = []
            for name, pool in self._pools.items():
                if call.stages is not None and name not in call.stages:
                    continue
                for replica_id in pool.live_replica_ids:
                    operation = pool.replica(replica_id).operations.get(call.method)
                    if operation is not None:
                        results.append(await operation(*call.args, **call.kwargs))
        except Exception as error:  # Carried to the caller, who waits for it.
            self._send([CallResult(call_id=call.call_id, error=error)])
            return
        self._send([CallResult(call_id=call.call_id, results=results)])

    # Steps.

    async def _poll(self, stage: str, replica_id: int, replica: StageReplica) -> None:
        pool = self._pools[stage]
        while pool.is_attached(replica_id, replica):
            try:
                outputs = await replica.outputs()
            except EngineDeadError as error:
                await self._replica_died(stage, replica_id, replica, error)
                return
            await self._settle(stage, outputs)

    async def _watch_for_hang(self, stage: str, replica_id: int, replica: StageReplica) -> None:
        pool = self._pools[stage]
        timeout = self._topology.reliability.hang_timeout(pool.stage)
        try:
            await watch_for_hang(pool, replica_id, replica, timeout)
        except EngineDeadError as error:
            await self._replica_died(stage, replica_id, replica, error)

    async def _settle(self, stage: str, outputs: Sequence[StageOutput]) -> None:
        """Account for one engine step of a replica: emit, feed the edges, end what has ended."""
        messages: list[Message] = []
        starts: list[tuple[RequestState, str, StageInput]] = []
        updates: dict[str, list[tuple[str, StageInput]]] = defaultdict(list)
        ended: list[RequestState] = []
        now = time.monotonic()
        stage_id = self._stage_id(stage)
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                self._connector.cleanup(output.request_id)
                continue
            if output.error is not None:
                messages.append(failures.reported(output.request_id, output.error, stage_id))
                self._drop(messages[-1])
                continue
            state.note_output(stage, output, now)
            self._observer.output(state, stage, output, now)
            try:
                modality = made_modality(self._pools[stage].stage, output)
                if modality is not None and modality in state.modalities:
                    self._emit(stage, stage_id, modality, state, output, messages)
                if stage in state.edges:
                    self._feed(stage, state, output, starts, updates)
            except Exception as error:  # An edge's fault must not reach the other requests.
                if not isinstance(error, OmniClientError):
                    logger.exception("Request %s failed after stage %s", output.request_id, stage)
                messages.append(failures.raised(output.request_id, error, stage_id))
                self._drop(messages[-1])
                continue
            if output.finished:
                state.open_stages.discard(stage)
            if not state.open_stages:
                self._complete(state, messages)
                ended.append(self._states.pop(output.request_id))
        self._send(messages)
        # Starts first: several outputs of a request may come together.
        for state, target, stage_input in starts:
            await self._enter(state, target, stage_input)
        for target, batch in updates.items():
            await self._update(target, batch)
        for state in ended:
            await self._release(state)

    def _emit(
        self,
        stage: str,
        stage_id: int,
        modality: str,
        state: RequestState,
        output: StageOutput,
        messages: list[Message],
    ) -> None:
        """Give a final stage's output to the client."""
        began = time.monotonic()
        made = client_output(stage_id, modality, state, output, self._connector)
        if made is not None:
            state.submit = None
            messages.append(Emit(state.request_id, made))
            if made.audio is not None:
                self._observer.sound(state, stage, made.audio, began)

    def _feed(
        self,
        stage: str,
        state: RequestState,
        output: StageOutput,
        starts: list[tuple[RequestState, str, StageInput]],
        updates: dict[str, list[tuple[str, StageInput]]],
    ) -> None:
        """Give an output to the request's edges and collect what they yield."""
        for target, edge in state.edges[stage]:
            stage_input = edge.feed(output)
            if stage_input is not None and target in state.times:
                updates[target].append((state.request_id, stage_input))
            elif stage_input is not None:
                state.reserve(target)
                starts.append((state, target, stage_input))
            elif output.finished and target not in state.times:
                self._skip(state, target)

    def _skip(self, state: RequestState, stage: str) -> None:
        """The upstream stage ended with nothing to say: this stage and what follows stay out."""
        state.open_stages.discard(stage)
        for edge in self._pipeline.edges_from(stage):
            if edge.target in state.open_stages and edge.target not in state.times:
                self._skip(state, edge.target)

    def _complete(self, state: RequestState, messages: list[Message]) -> None:
        """Account for a request that has ended well, and mark its last output as last."""
        self._observer.ended(state, "stop")
        mark_last(state, messages, self._pipeline)

    async def _update(self, stage: str, batch: list[tuple[str, StageInput]]) -> None:
        for replica_id, (replica, error) in (await self._pools[stage].update(batch)).items():
            await self._replica_died(stage, replica_id, replica, error)

    # Failure and release.

    async def _release(self, state: RequestState) -> None:
        """The one way out for a request that has just been taken off `_states`: every stage forgets
        it and nothing of it stays."""
        request_id = state.request_id
        for name in state.times:
            pool = self._pools[name]
            if name in state.open_stages:
                await pool.abort([request_id])
            else:
                pool.unbind(request_id)
        self._connector.cleanup(request_id)
        self._attempts.forget(request_id)

    def _finish_with(self, messages: list[Message]) -> None:
        """Send failures and end their requests."""
        self._send(messages)
        for message in messages:
            self._drop(message)

    def _drop(self, message: Message) -> None:
        """End the request of a failure; it is released soon after."""
        assert isinstance(message, ErrorMessage) and message.request_id is not None
        state = self._states.pop(message.request_id, None)
        if state is not None:
            self._observer.failed(state, message)
            self._spawn(self._release(state))

    def _fail_with(self, request_id: str, error: Exception, stage_id: int) -> None:
        if not isinstance(error, ValueError | VLLMClientError):
            logger.error("Request %s failed in stage %d", request_id, stage_id, exc_info=error)
        self._finish_with([failures.raised(request_id, error, stage_id)])

    def _fail(self, request_id: str, error: str) -> None:
        self._finish_with([failures.given_up(request_id, error)])

    async def _replica_died(
        self, stage: str, replica_id: int, replica: StageReplica, error: EngineDeadError
    ) -> None:
        """Evict a dead replica, and see to its requests: all of the stage's if it was the last.

        Several tasks may notice the same death; the first one acts.
        """
        # Requests take the error with them, and its frames would keep the dead replica.
        error.with_traceback(None)
        pool = self._pools[stage]
        if not pool.is_attached(replica_id, replica):
            return
        logger.error("Stage %s replica %d died, evicting it: %s", stage, replica_id, error.args[-1])
        lost = set(pool.requests_on(replica_id))
        ending = pool.evict_replica(replica_id)
        self._metrics.evicted(stage)
        if pool.live_num_replicas == 0:
            lost |= {r for r, state in self._states.items() if stage in state.times}
        self._lose(lost, pool, error)
        assert ending is not None
        self._spawn(self._restore(stage, replica_id, ending))

    async def _restore(self, stage: str, replica_id: int, ending: asyncio.Future[None]) -> None:
        """Start an evicted replica again, once what is left of it has ended."""
        await ending
        if await self._recovery.restart(self._pools[stage], replica_id):
            self._metrics.respawned(stage)
            self._attend(stage, replica_id)

    def _lose(self, request_ids: Iterable[str], pool: StagePool, error: EngineDeadError) -> None:
        """Fail requests whose replica died, but for those that can be tried once more."""
        told: list[Message] = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and self._may_retry(state):
                self._metrics.retried(pool.stage.name)
                self._retry(state)
            elif state is not None:
                told.append(failures.lost(request_id, error, pool.stage_id))
        self._finish_with(told)

    def _may_retry(self, state: RequestState) -> bool:
        return (
            self._topology.reliability.retry_requests
            and state.submit is not None
            and not self._attempts.is_second(state.request_id)
            and all(self._pools[name].live_num_replicas for name in state.needed)
        )

    def _retry(self, state: RequestState) -> None:
        """Start a request over, as if it had just come."""
        assert state.submit is not None
        del self._states[state.request_id]
        self._observer.retried(state)
        self._spawn(self._release(state))
        again = self._attempts.again(state.request_id)
        logger.info("Request %s lost its replica and is tried again", state.request_id)
        self._add_request(msgspec.structs.replace(state.submit, request_id=again))

    async def _watch_health(self) -> None:
        """Notice replicas that die while nothing is asked of them."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._metrics.loop_lag(time.monotonic() - began - HEALTH_INTERVAL_S)
            for name, pool in self._pools.items():
                for replica_id in pool.live_replica_ids:
                    replica = pool.replica(replica_id)
                    try:
                        await replica.check_health()
                    except EngineDeadError as error:
                        await self._replica_died(name, replica_id, replica, error)

    # Small things.

    def _stage_id(self, stage: str) -> int:
        return self._pools[stage].stage_id

    def _send(self, messages: list[Message]) -> None:
        if messages:
            self._outbox.put_nowait(self._attempts.for_caller(messages))

    def _spawn(self, work: Awaitable[None]) -> None:
        """Run a coroutine beside the command loop; a bug in it is fatal, never silent."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._report_bug)

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("Orchestrator task failed", exc_info=error)
            self._send([ErrorMessage(error=str(error), fatal=True, cause=error)])
