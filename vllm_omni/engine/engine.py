# SPDX-License-Identifier: Apache-2.0
"""The orchestrator's thread, and the two queues that lead to it and back."""

import asyncio
import threading
from collections.abc import Sequence

import janus
from vllm.logger import init_logger

from vllm_omni.connectors.base import OmniConnector
from vllm_omni.engine.messages import Command, ErrorMessage, Message, Shutdown
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.topology import Topology

logger = init_logger(__name__)

JOIN_TIMEOUT_S = 15.0


class OmniEngine:
    """Runs the orchestrator in its own thread and event loop.

    Args:
        topology: What is deployed.
        pools: One per stage; their replicas run already.
        connector: The orchestrator's own connector instance.
    """

    def __init__(
        self, topology: Topology, pools: Sequence[StagePool], connector: OmniConnector
    ) -> None:
        self.topology = topology
        self.pools = tuple(pools)
        self._connector = connector
        self._inbox: janus.Queue[Command] = janus.Queue()
        self._outbox: janus.Queue[list[Message]] = janus.Queue()
        self._thread = threading.Thread(target=self._run, name="vllm-omni-orchestrator")
        self._thread.daemon = True
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the orchestrator runs; its death is the only process-fatal one (B-12)."""
        return self._thread.is_alive()

    def send(self, command: Command) -> None:
        """Give the orchestrator a command; from any thread, never blocks."""
        self._inbox.sync_q.put_nowait(command)

    async def receive(self) -> list[Message]:
        """The next step's messages, for an asyncio caller."""
        return await self._outbox.async_q.get()

    def receive_sync(self, timeout: float | None = None) -> list[Message]:
        """The next step's messages, for a plain caller.

        Raises:
            janus.SyncQueueEmpty: Nothing came within `timeout` seconds.
        """
        return self._outbox.sync_q.get(timeout=timeout)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the orchestrator and every stage. Idempotent."""
        if self._thread.is_alive():
            logger.info("[AsyncOmniEngine] Shutting down Orchestrator")
            self.send(Shutdown(timeout))
            self._thread.join(JOIN_TIMEOUT_S + (timeout or 0.0))
            if self._thread.is_alive():
                logger.warning("The orchestrator thread did not exit in time")
        for pool in self.pools:
            pool.shutdown(timeout=0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # The thread's end is the engine's end: say so and stop.
            logger.exception("The orchestrator died")
            self._outbox.sync_q.put_nowait(
                [ErrorMessage(error=str(error) or "Orchestrator died", fatal=True, cause=error)]
            )

    async def _serve(self) -> None:
        orchestrator = Orchestrator(
            self.topology, self.pools, self._connector, self._inbox.async_q, self._outbox.sync_q
        )
        await orchestrator.run()
