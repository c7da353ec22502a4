# SPDX-License-Identifier: Apache-2.0
"""The orchestrator with a meter for its own CPU time.

Counted, by `time.thread_time` on the orchestrator's thread: every stretch in which a coroutine of
the orchestrator itself runs for an engine step, from the moment that a replica's outputs are there
to the moment that it waits for the next ones. That is `_settle` whole: request state, metrics,
edges, what the client gets (sound is read from the connector there), the queue to the caller, stage
pools, release and the connector's clean-up. Not counted: what runs inside of a replica (`outputs`,
`submit`, `update`, `abort`), which is vLLM's front end (deserializing, detokenizing, serializing,
sending) and would run without an orchestrator as well. Starting a request (`_add_request`, and
`_enter` of the entry stage) happens once per request and is counted apart.

CPU time is measured per stretch between two suspensions of a coroutine, so other tasks of the same
thread do not count.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from vllm_omni.connectors.base import OmniConnector
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.messages import Submit
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.request_state import RequestState
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.topology import Topology
from vllm_omni.outputs import StageOutput
from vllm_omni.replica import StageReplica

T = TypeVar("T")


class Metered(Awaitable[T]):
    """An awaitable whose CPU time is added up while it runs.

    Args:
        work: What to run.
        add: Gets the CPU seconds of each stretch.
    """

    def __init__(self, work: Awaitable[T], add: Callable[[float], None]) -> None:
        self._work = work
        self._add = add

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        while True:
            start = time.thread_time()
            try:
                waits_for = next(steps)
            except StopIteration as end:
                return end.value
            finally:
                self._add(time.thread_time() - start)
            yield waits_for


class Meter:
    """CPU seconds of the orchestrator's thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.steps: list[tuple[str, int, float]] = []
        self.starts = 0
        self.start = 0.0
        self.inside = 0.0
        self.replica = 0.0

    def add_replica(self, seconds: float) -> None:
        """Time inside of a replica."""
        self.replica += seconds
        self.inside += seconds

    def result(self, full: int) -> dict[str, Any]:
        """Milliseconds per step."""
        wide = [step for step in self.steps if step[1] >= full]
        stages = dict.fromkeys(stage for stage, _, _ in wide)
        return {
            "steps": len(self.steps),
            "full_steps": len(wide),
            "outputs_per_step": _mean([count for _, count, _ in self.steps]),
            "outputs_per_full_step": _mean([count for _, count, _ in wide]),
            "own_ms_step": 1000 * _mean([cost for _, _, cost in self.steps]),
            "own_ms_full_step": 1000 * _mean([cost for _, _, cost in wide]),
            "own_ms_start": 1000 * self.start / max(1, self.starts),
            "replica_ms_step": 1000 * self.replica / max(1, len(self.steps)),
            "own_ms_by_stage": {
                stage: 1000 * _mean([cost for name, _, cost in wide if name == stage])
                for stage in stages
            },
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


METER = Meter()


class MeteredReplica(StageReplica):
    """A replica whose time is told apart."""

    def __init__(self, replica: StageReplica) -> None:
        self._replica = replica

    async def submit(self, *args: Any, **kwargs: Any) -> None:
        await Metered(self._replica.submit(*args, **kwargs), METER.add_replica)

    async def update(self, updates: Any) -> None:
        await Metered(self._replica.update(updates), METER.add_replica)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await Metered(self._replica.abort(request_ids), METER.add_replica)

    async def outputs(self) -> list[StageOutput]:
        return await self._replica.outputs()

    async def check_health(self) -> None:
        await self._replica.check_health()

    async def ping(self) -> None:
        await self._replica.ping()

    @property
    def load(self) -> int:
        return self._replica.load

    @property
    def capacity(self) -> int:
        return self._replica.capacity

    @property
    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        return self._replica.operations

    def shutdown(self, timeout: float | None = None) -> None:
        self._replica.shutdown(timeout)


class MeteredOrchestrator(Orchestrator):
    """Counts the CPU time of each settled step and each started request."""

    async def _settle(self, stage: str, outputs: Sequence[StageOutput]) -> None:
        account = _Account()
        await Metered(super()._settle(stage, outputs), account.add)
        METER.steps.append((stage, len(outputs), account.own))

    def _add_request(self, submit: Submit) -> None:
        start = time.thread_time()
        super()._add_request(submit)
        METER.starts += 1
        METER.start += time.thread_time() - start

    async def _enter(self, state: RequestState, stage: str, prompt: Any, **kwargs: Any) -> None:
        entering = super()._enter(state, stage, prompt, **kwargs)
        if stage != self._pipeline.entry.name:  # It is part of a settled step.
            await entering
            return
        account = _Account()
        await Metered(entering, account.add)
        METER.start += account.own


class _Account:
    """CPU seconds of one coroutine without what its replicas took in the same stretches."""

    def __init__(self) -> None:
        self.own = 0.0

    def add(self, seconds: float) -> None:
        # A replica's stretch ends within the one around it; no other task runs in between.
        self.own += seconds - METER.inside
        METER.inside = 0.0


class MeteredEngine(OmniEngine):
    """An engine that runs the metered orchestrator over metered replicas."""

    def __init__(
        self, topology: Topology, pools: Sequence[StagePool], connector: OmniConnector
    ) -> None:
        metered = [
            StagePool(pool.stage, pool.stage_id, [MeteredReplica(pool.replica(0))])
            for pool in pools
        ]
        super().__init__(topology, metered, connector)

    async def _serve(self) -> None:
        orchestrator = MeteredOrchestrator(
            self.topology, self.pools, self._connector, self._inbox.async_q, self._outbox.sync_q
        )
        await orchestrator.run()
