# SPDX-License-Identifier: Apache-2.0
"""Replicas that died or hang: noticing it, and starting them again.

A replica is asked for a sign of life while it has work. One that does not answer within the hang
timeout (a deadlock, a stopped process, a device that does not return) is as good as dead, and worse
for its requests: it never fails.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.plan import Reliability
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.start_up import DeviceTurns
from vllm_omni.fork_server import ForkServerGoneError
from vllm_omni.replica import StageReplica, StartingReplica
from vllm_omni.start_report import POLL_S, describe

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 60.0
STABLE_S = 300.0
"""A replica that has lived so long starts with a clean record when it dies."""
PING_INTERVAL_S = 2.0


@dataclass(slots=True)
class _Record:
    """How often a replica has had to be started since it was last stable."""

    attempts: int = 0
    attached: float = 0.0

    def next_delay(self) -> float:
        if self.attached and time.monotonic() - self.attached > STABLE_S:
            self.attempts = 0
        self.attempts += 1
        return float(min(FIRST_DELAY_S * 2 ** (self.attempts - 1), LONGEST_DELAY_S))


class Recovery:
    """Starts dead replicas again. Lives in the orchestrator's loop."""

    def __init__(self, reliability: Reliability) -> None:
        self._most_attempts = reliability.max_respawns
        self._records: dict[tuple[int, int], _Record] = {}
        self._starting: set[StartingReplica] = set()
        self._turns = DeviceTurns()
        self._closed = False

    async def restart(self, pool: StagePool, replica_id: int) -> bool:
        """Start a replica again, as often as it takes, and attach it to its pool.

        The delays between attempts double from half a second to a minute.

        Returns:
            Whether it lives; False once there have been too many attempts.
        """
        if replica_id >= len(pool.launches):
            return False
        record = self._records.setdefault((pool.stage_id, replica_id), _Record())
        name = f"stage {pool.stage.name} replica {replica_id}"
        while True:
            delay = record.next_delay()
            if record.attempts > self._most_attempts:
                logger.error("Not starting %s again: %d attempts", name, self._most_attempts)
                return False
            await asyncio.sleep(delay)
            try:
                async with self._turn(pool.launches[replica_id].devices):
                    if self._closed:
                        return False
                    logger.info("Starting %s again, attempt %d", name, record.attempts)
                    replica = await asyncio.to_thread(self._start, pool, replica_id)
            except ForkServerGoneError as error:
                if pool.live_num_replicas == 0:
                    raise  # the stage cannot serve ever again: the server is to end, for a new one
                logger.error("%s cannot be started again: %s", name.capitalize(), error)
                return False
            except Exception as error:  # Engines raise anything; the next attempt may go well.
                if self._closed:
                    return False
                logger.error("%s did not start: %s", name.capitalize(), describe(error))
                continue
            if self._closed:
                replica.shutdown(0)
                return False
            record.attached = time.monotonic()
            pool.attach_replica(replica_id, replica)
            logger.info("%s serves again", name.capitalize())
            return True

    @asynccontextmanager
    async def _turn(self, devices: Collection[str]) -> AsyncIterator[None]:
        """Wait until no other replica starts on these devices."""
        while not self._turns.take(devices):
            await asyncio.sleep(POLL_S)
        try:
            yield
        finally:
            self._turns.leave(devices)

    def _start(self, pool: StagePool, replica_id: int) -> StageReplica:
        starting = pool.launches[replica_id].begin()
        self._starting.add(starting)
        try:
            return starting.ready()
        finally:
            self._starting.discard(starting)

    def close(self) -> None:
        """Have every start that is on its way fail."""
        self._closed = True
        for starting in list(self._starting):
            starting.abandon()


async def watch_for_hang(
    pool: StagePool, replica_id: int, replica: StageReplica, timeout: float
) -> None:
    """Ping a replica, while it has work, for as long as it is attached.

    Raises:
        EngineDeadError: It has not answered within `timeout` seconds, or its process is gone.
    """
    while True:
        await asyncio.sleep(min(PING_INTERVAL_S, timeout))
        if not pool.is_attached(replica_id, replica):
            return
        if not replica.load:
            continue
        try:
            async with asyncio.timeout(timeout):
                await replica.ping()
        except TimeoutError:
            raise EngineDeadError(
                f"stage {pool.stage.name!r} has given no sign of life for {timeout:g} s"
            ) from None
