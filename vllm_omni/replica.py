# SPDX-License-Identifier: Apache-2.0
"""The contract of a stage replica, whatever engine runs it.

The orchestrator knows replicas only through this class. A replica lives in the orchestrator's
event loop and drives one or more processes of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from vllm_omni.inputs import StageInput
from vllm_omni.outputs import StageOutput


class StageReplica(ABC):
    """One running copy of a stage.

    Every coroutine runs on the orchestrator's loop and never blocks it. A replica whose process
    died raises vLLM's `EngineDeadError` from `submit`, `update`, `outputs` and `check_health`.
    """

    @abstractmethod
    async def submit(
        self, request_id: str, prompt: Any, params: Any, *, emit: bool = False, **kwargs: Any
    ) -> None:
        """Start a request.

        Args:
            request_id: The pipeline's request id; unique among the live requests of the pipeline.
            prompt: A vLLM prompt for an entry stage, else a `RowPrompt` or `ProgramInput`.
            params: The stage's sampling parameters.
            emit: Downstream stages of this request need this stage's rows.
            kwargs: What vLLM's `AsyncLLM.add_request` takes beside (LoRA, priority, ...).

        Raises:
            OmniClientError: The request is invalid.
        """

    @abstractmethod
    async def update(self, updates: Sequence[tuple[str, StageInput]]) -> None:
        """Append input to running requests: one message, however many requests.

        Updates of requests that have ended are dropped.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests and free what they hold. Unknown ids are ignored."""

    @abstractmethod
    async def outputs(self) -> list[StageOutput]:
        """Wait for the next engine step that produced something and return all of it."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the replica's process is gone."""

    @abstractmethod
    async def ping(self) -> None:
        """Return once the engine has answered between two of its steps; may take for ever.

        Raises `EngineDeadError` if the replica's process is gone.
        """

    @property
    @abstractmethod
    def load(self) -> int:
        """Requests submitted and not yet ended, for least-loaded routing."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Requests that it can run at once; more of them wait in it."""

    @property
    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        """Administrative operations that this kind of replica supports, by name."""
        return {}

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the processes. Idempotent; called from any thread."""


class StartingReplica(Protocol):
    """A replica that has been begun."""

    @property
    def link(self) -> Connection | None:
        """Readable once `ready` need not wait; None for one that starts where it is waited for."""

    def ready(self, check: Callable[[], None] = ...) -> StageReplica:
        """Block until it serves; raises, and has ended what was begun, if it does not.

        `check` is called meanwhile, ten times a second; what it raises ends the wait.
        """

    def abandon(self) -> None:
        """From another thread than that of `ready`: have `ready` fail soon."""

    def cancel(self) -> None:
        """End what was begun. Idempotent, and harmless after the replica's own shutdown."""


class ReplicaLaunch(Protocol):
    """How to start a replica, as often as it has to be. Called from any thread."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Accelerators that it runs on: no other may start there meanwhile. None on a CPU."""

    def begin(self) -> StartingReplica:
        """Start it, without waiting for it."""

    def close(self) -> None:
        """Let go of what is kept from one start to the next. Idempotent; none follows."""
