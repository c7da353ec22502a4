# SPDX-License-Identifier: Apache-2.0
"""Which replicas start together (issue 6): proven by what each sees, not by how long it takes."""

from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import FakeReplica
from vllm_omni.engine.start_up import StageStartError, Start, StartUp
from vllm_omni.replica import StartingReplica

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


class Launch:
    """A replica that is ready when it is told to be."""

    def __init__(self, devices: tuple[str, ...], error: str = "") -> None:
        self.devices = devices
        self.error = error
        self.link, self.theirs = Pipe()

    link: Connection

    def begin(self) -> "Launch":
        return self

    def ready(self, check: Callable[[], None] = lambda: None) -> FakeReplica:
        self.link.recv()
        if self.error:
            raise OSError(self.error)
        return FakeReplica()

    def tell(self) -> None:
        self.theirs.send("ready")

    def abandon(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


def start(launches: list[Launch], tell: Callable[[list[Launch]], None], timeout: float = 30) -> str:
    """Start them; `tell` is given those that have been begun and not ended. How each went."""
    running: list[Launch] = []
    starts = [Start(f"s{i}", 0, launch) for i, launch in enumerate(launches)]

    def begin(each: Start) -> StartingReplica:
        assert isinstance(each.launch, Launch)
        assert not any(set(o.devices) & set(each.launch.devices) for o in running)
        running.append(each.launch)
        return each.launch

    def check() -> None:
        if running:
            tell(running)

    for each, _ in StartUp(starts, timeout, begin).run(check):
        assert isinstance(each.launch, Launch)
        running.remove(each.launch)
    return "; ".join(map(str, starts))


def test_together_but_not_on_one_device() -> None:
    """Nobody is ready before all are begun whose devices are free."""
    told: list[list[str]] = []

    def tell(running: list[Launch]) -> None:
        told.append([launch.devices[0] if launch.devices else "cpu" for launch in running])
        for launch in running:
            launch.tell()

    launches = [Launch(("0",)), Launch(("1",)), Launch(("1",)), Launch(()), Launch(())]
    said = start(launches, tell)
    assert told[0] == ["0", "1", "cpu", "cpu"]
    assert "after s1[0] (device 1)" in said.split("; ")[2] and said.count("after") == 1


@settings(deadline=None, max_examples=25)  # a step of the wait is 0.1 s
@given(st.lists(st.sets(st.sampled_from("0123"), max_size=3), min_size=1, max_size=8), st.randoms())
def test_all_start_in_order_on_each_device(groups: list[set[str]], random: object) -> None:
    launches = [Launch(tuple(sorted(group))) for group in groups]
    order: list[int] = []

    def tell(running: list[Launch]) -> None:
        launch = running[random.randrange(len(running))]  # type: ignore[attr-defined]
        order.append(launches.index(launch))
        launch.tell()

    start(launches, tell)
    assert sorted(order) == list(range(len(launches)))
    for device in "0123":
        on = [i for i in order if device in launches[i].devices]
        assert on == sorted(on)


def test_the_first_failure_ends_the_wait() -> None:
    """Whichever stage fails: the first one never gets ready here."""
    failing = Launch(("1",), error="no room")

    def tell(running: list[Launch]) -> None:
        failing.tell()

    with pytest.raises(StageStartError, match=r"stage 's1' \(replica 0\) did not start.*no room"):
        start([Launch(("0",)), failing, Launch(("0",))], tell)


def test_one_that_says_nothing() -> None:
    with pytest.raises(StageStartError, match=r"'s0'.*not ready after 0.05 s"):
        start([Launch(())], lambda running: None, timeout=0.05)
