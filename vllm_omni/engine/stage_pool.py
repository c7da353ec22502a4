# SPDX-License-Identifier: Apache-2.0
"""The replicas of one stage: routing, stickiness, eviction (rows B-01, B-02)."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.pipeline import Stage
from vllm_omni.errors import OverloadedError, StageUnavailableError
from vllm_omni.inputs import StageInput
from vllm_omni.replica import ReplicaLaunch, StageReplica

logger = init_logger(__name__)


class StagePool:
    """A stage's replicas. A request stays with the replica it was submitted to.

    Args:
        stage: The stage.
        stage_id: Its index in the pipeline.
        replicas: At least one.
        launches: How to start each of them again; empty if they cannot be.
        max_requests: Most requests in all replicas together; None for no bound.
    """

    def __init__(
        self,
        stage: Stage,
        stage_id: int,
        replicas: Sequence[StageReplica],
        launches: Sequence[ReplicaLaunch] = (),
        max_requests: int | None = None,
    ) -> None:
        self.stage = stage
        self.stage_id = stage_id
        self.launches = tuple(launches)
        self._replicas: list[StageReplica | None] = list(replicas)
        self._bound: dict[str, int] = {}
        self._max_requests = max_requests

    @property
    def num_replicas(self) -> int:
        """Replicas that the pool was made with, evicted ones included."""
        return len(self._replicas)

    @property
    def live_replica_ids(self) -> list[int]:
        """Ids of the replicas that are not evicted."""
        return [i for i, replica in enumerate(self._replicas) if replica is not None]

    @property
    def loads(self) -> dict[int, int]:
        """Requests that each live replica has; from any thread."""
        return {i: replica.load for i, replica in enumerate(self._replicas) if replica is not None}

    @property
    def live_num_replicas(self) -> int:
        """How many replicas are not evicted."""
        return len(self.live_replica_ids)

    @property
    def load(self) -> int:
        """Requests that live replicas have, waiting or running."""
        return sum(replica.load for replica in self._replicas if replica)

    @property
    def capacity(self) -> int:
        """Requests that live replicas can run at once."""
        return sum(replica.capacity for replica in self._replicas if replica)

    def replica(self, replica_id: int) -> StageReplica:
        """A live replica.

        Raises:
            StageUnavailableError: It has been evicted.
        """
        replica = self._replicas[replica_id]
        if replica is None:
            raise StageUnavailableError(
                f"stage {self.stage_id} replica {replica_id} is not attached"
            )
        return replica

    def is_attached(self, replica_id: int, replica: StageReplica) -> bool:
        """Whether this very replica has not been evicted; another may be in its place."""
        return self._replicas[replica_id] is replica

    def select_replica_id(self) -> int:
        """The least loaded live replica.

        Raises:
            StageUnavailableError: None is left.
        """
        live = [(replica.load, i) for i, replica in enumerate(self._replicas) if replica]
        if not live:
            raise StageUnavailableError(f"stage {self.stage_id} has no live replicas")
        return min(live)[1]

    def bound_replica_id(self, request_id: str) -> int | None:
        """Which replica has the request."""
        return self._bound.get(request_id)

    def requests_on(self, replica_id: int) -> list[str]:
        """Requests bound to a replica."""
        return [request for request, bound in self._bound.items() if bound == replica_id]

    def bind(self, request_id: str) -> int:
        """Choose a replica for a request and remember it.

        Raises:
            OverloadedError: The stage has as many requests as it may.
            StageUnavailableError: No replica lives.
        """
        if self._max_requests is not None and self.load >= self._max_requests:
            raise OverloadedError(
                f"stage {self.stage.name!r} is busy with {self._max_requests} requests, "
                "the most that it takes; try again later"
            )
        replica_id = self._bound[request_id] = self.select_replica_id()
        return replica_id

    async def submit(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> None:
        """Start a request on the replica that it is bound to."""
        await self.replica(self._bound[request_id]).submit(request_id, prompt, params, **kwargs)

    async def update(
        self, updates: Sequence[tuple[str, StageInput]]
    ) -> dict[int, tuple[StageReplica, EngineDeadError]]:
        """Append input to running requests: one message per replica.

        What belongs to no live replica is dropped: its request has ended or is about to.

        Returns:
            The replicas that turned out dead; the others have got their updates.
        """
        by_replica: dict[int, list[tuple[str, StageInput]]] = defaultdict(list)
        for request_id, stage_input in updates:
            replica_id = self._bound.get(request_id)
            if replica_id is not None and self._replicas[replica_id] is not None:
                by_replica[replica_id].append((request_id, stage_input))
        dead = {}
        for replica_id, batch in by_replica.items():
            if (replica := self._replicas[replica_id]) is None:
                continue
            try:
                await replica.update(batch)
            except EngineDeadError as error:
                dead[replica_id] = (replica, error)
        return dead

    def unbind(self, request_id: str) -> int | None:
        """Forget a request; returns the replica that had it."""
        return self._bound.pop(request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests wherever they run, and forget them."""
        by_replica: dict[int, list[str]] = defaultdict(list)
        for request_id in request_ids:
            replica_id = self._bound.pop(request_id, None)
            if replica_id is not None and self._replicas[replica_id] is not None:
                by_replica[replica_id].append(request_id)
        for replica_id, batch in by_replica.items():
            if (replica := self._replicas[replica_id]) is not None:
                with suppress(EngineDeadError):  # then there is nothing to stop
                    await replica.abort(batch)

    def attach_replica(self, replica_id: int, replica: StageReplica) -> None:
        """Fill the hole that an evicted replica has left."""
        assert self._replicas[replica_id] is None, "the replica was not evicted"
        self._replicas[replica_id] = replica

    def evict_replica(self, replica_id: int) -> asyncio.Future[None] | None:
        """Leave a hole in a dead replica's place, at once, and shut it down in a thread.

        Its requests are forgotten, for another may take its place.

        Returns:
            The shutdown; None if it was evicted before.

        Raises:
            ValueError: There is no such replica.
        """
        if not 0 <= replica_id < self.num_replicas:
            raise ValueError(
                f"evict_replica: replica_id {replica_id} out of range "
                f"(num_replicas={self.num_replicas})"
            )
        replica, self._replicas[replica_id] = self._replicas[replica_id], None
        if replica is None:
            return None
        for request_id in self.requests_on(replica_id):
            del self._bound[request_id]
        return asyncio.get_running_loop().run_in_executor(None, _shut_down_dead, replica)

    def shutdown(self, timeout: float | None = None) -> None:
        """End every replica."""
        for replica_id, replica in enumerate(self._replicas):
            if replica is not None:
                self._replicas[replica_id] = None
                replica.shutdown(timeout)


def _shut_down_dead(replica: StageReplica) -> None:
    """What is left of a dead replica may fail to end; its place is filled all the same."""
    try:
        replica.shutdown(0)
    except Exception:
        logger.exception("A dead replica did not shut down in order")
