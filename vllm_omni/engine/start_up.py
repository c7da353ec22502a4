# SPDX-License-Identifier: Apache-2.0
"""In which order replicas start: together, but one at a time on a device.

An engine core measures a device's memory while it starts: what others take or free there meanwhile
it counts as its own, or gives up (vLLM's `memory_profiling`, `determine_available_memory`). So each
device has turns, in the order of the plan. Devices of one replica are taken together or not at all,
so that no two wait for each other.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from vllm.logger import init_logger

from vllm_omni.errors import OmniConfigError, OmniError
from vllm_omni.replica import ReplicaLaunch, StageReplica, StartingReplica
from vllm_omni.start_report import POLL_S, Check, StartFailure, describe

logger = init_logger(__name__)


class StageStartError(OmniError, RuntimeError):
    """A stage did not come up; says which, and why."""


class DeviceTurns:
    """Which devices replicas start on at the moment."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, devices: Collection[str]) -> bool:
        """Take all of them, unless one is taken; whether it was possible."""
        if not self._taken.isdisjoint(devices):
            return False
        self._taken.update(devices)
        return True

    def leave(self, devices: Collection[str]) -> None:
        """Let others have them."""
        self._taken.difference_update(devices)


@dataclass(slots=True, eq=False)
class Start:
    """A replica's start.

    Attributes:
        stage: Name of its stage.
        replica_id: Its index in the stage.
        launch: How it is started.
        after: Those that it has waited for, with the devices that they were on.
        begun: When it was begun.
        seconds: How long it has then taken.
    """

    stage: str
    replica_id: int
    launch: ReplicaLaunch
    after: dict[str, tuple[str, ...]] = field(default_factory=dict)
    starting: StartingReplica | None = None
    begun: float = 0.0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.stage}[{self.replica_id}]"

    def wait_for(self, others: Iterable["Start"]) -> None:
        """Note those that are on a device of this one."""
        for other in others:
            if shared := set(self.launch.devices).intersection(other.launch.devices):
                self.after.setdefault(other.name, tuple(sorted(shared)))

    def __str__(self) -> str:
        """How it went: `talker[0] in 20.1 s after thinker[0] (device 1)`."""
        waited = [f"{name} (device {', '.join(on)})" for name, on in self.after.items()]
        return f"{self.name} in {self.seconds:.1f} s" + (
            f" after {', '.join(waited)}" if waited else ""
        )


@contextmanager
def said_of(stage: str, replica_id: int) -> Iterator[None]:
    """Say of whatever goes wrong inside which stage it was."""
    try:
        yield
    except (OmniConfigError, StageStartError):
        raise
    except Exception as error:  # Engines raise anything; the caller wants to know which stage.
        raise StageStartError(
            f"stage {stage!r} (replica {replica_id}) did not start: {describe(error)}"
        ) from error


class StartUp:
    """Starts replicas, each as soon as those before it have left its devices.

    Args:
        starts: In the order in which those on one device come.
        timeout: Seconds that each may take once it is begun.
        begin: Begins one; called in order.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        timeout: float,
        begin: Callable[[Start], StartingReplica],
    ) -> None:
        self._waiting = list(starts)
        self._running: list[Start] = []
        self._turns = DeviceTurns()
        self._timeout = timeout
        self._begin = begin

    def run(self, check: Check) -> Iterator[tuple[Start, StageReplica]]:
        """Start all of them; gives each when it serves.

        What has been begun is ended by whoever began it, if this raises.

        Args:
            check: Called ten times a second; what it raises ends the wait.

        Raises:
            OmniConfigError: A replica cannot start with these settings.
            StageStartError: A replica did not start; the first that says so, whichever it is.
        """
        done: list[Start] = []
        while self._waiting or self._running:
            check()
            self._begin_all()
            for start in self._settled():
                with said_of(start.stage, start.replica_id):
                    assert start.starting is not None
                    replica = start.starting.ready(check)
                start.seconds = time.monotonic() - start.begun
                self._running.remove(start)
                self._turns.leave(start.launch.devices)
                done.append(start)
                yield start, replica
        logger.info("Started %s", "; ".join(map(str, done)))

    def _begin_all(self) -> None:
        """Begin those whose turn it is; one that waits keeps its devices from those behind it."""
        left: list[Start] = []
        for start in self._waiting:
            ahead = [*self._running, *left]
            start.wait_for(ahead)
            free = all(set(start.launch.devices).isdisjoint(o.launch.devices) for o in left)
            if not free or not self._turns.take(start.launch.devices):
                left.append(start)
                continue
            start.begun = time.monotonic()
            start.starting = self._begin(start)
            self._running.append(start)
        self._waiting = left

    def _settled(self) -> list[Start]:
        """Those that need not be waited for any more.

        Raises:
            StageStartError: One has taken too long.
        """
        links = {}
        for start in self._running:
            assert start.starting is not None
            if start.starting.link is None:  # starts only where it is waited for
                return [start]
            links[start.starting.link] = start
        spoke = wait(list(links), POLL_S)
        late = time.monotonic() - self._timeout
        for link, start in links.items():
            if start.begun < late and link not in spoke:
                with said_of(start.stage, start.replica_id):
                    raise StartFailure(f"it was not ready after {self._timeout:g} s")
        return [start for link, start in links.items() if link in spoke]
