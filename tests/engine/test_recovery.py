# SPDX-License-Identifier: Apache-2.0
"""Dead and hung replicas: they are started again, and requests are tried once more (issue 3).

What real processes do under signals is in tests/dfx/reliability; here are the cases that cannot be
brought about on demand.
"""

import asyncio
import gc
import weakref
from itertools import pairwise

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.fakes import FakeLaunch, House, house, sound, tokens
from vllm_omni.config.plan import Reliability
from vllm_omni.engine import recovery
from vllm_omni.engine.messages import Emit, ErrorMessage
from vllm_omni.errors import StageUnavailableError
from vllm_omni.fork_server import ForkServerGoneError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

RESPAWN = Reliability(max_respawns=10, retry_requests=False)
RETRY = Reliability(max_respawns=0, retry_requests=True)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(recovery, "PING_INTERVAL_S", 0.02)


async def until_live(it: House, stage: str, replicas: int) -> None:
    async with asyncio.timeout(5):
        while it.pools[stage].live_num_replicas != replicas:
            await asyncio.sleep(0.005)


def kill(it: House, stage: str, index: int = 0) -> None:
    """Have the replica die with its next step."""
    it.replica(stage, index).dies_in = "outputs"
    it.replica(stage, index).step()


def counted(name: str) -> float:
    """A count of the stage `talk`."""
    return REGISTRY.get_sample_value(f"vllm_omni:{name}_total", {"stage": "talk"}) or 0


async def test_a_dead_replica_is_started_again() -> None:
    names = ("replica_evictions", "replica_respawns")
    before = [counted(name) for name in names]
    async with house(RESPAWN, talk=2) as it:
        kill(it, "talk", 1)
        await until_live(it, "talk", 1)
        await until_live(it, "talk", 2)
        assert [counted(name) for name in names] == [count + 1 for count in before]
        for each in ("a", "b"):
            await it.served(each, "text", "audio")
        await it.assert_empty()


async def test_a_server_that_cannot_start_replicas_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It serves as long as it can, and ends with a stage's last replica: a new one is whole."""

    def gone(self: FakeLaunch) -> FakeLaunch:
        raise ForkServerGoneError("gone")

    monkeypatch.setattr(FakeLaunch, "begin", gone)
    async with house(RESPAWN, talk=2) as it:
        kill(it, "talk", 1)
        await until_live(it, "talk", 1)
        await asyncio.sleep(0.1)
        await it.served("a", "text", "audio")
        kill(it, "talk", 0)
        async with asyncio.timeout(5):
            while True:
                told = await it.outbox.async_q.get()
                if any(isinstance(each, ErrorMessage) and each.fatal for each in told):
                    return


async def test_what_requests_are_told_does_not_keep_a_dead_replica() -> None:
    """Its sockets and threads go with it, not with the next full garbage collection."""
    async with house(RESPAWN) as it:
        it.submit("a", "text")
        await it.settle()
        dead = weakref.ref(it.replica("think"))
        gc.disable()
        try:
            kill(it, "think")
            told = await it.failure("a")
            assert isinstance(told, EngineDeadError)
            async with asyncio.timeout(5):
                while dead() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_a_dead_replica_that_does_not_even_end_is_replaced() -> None:
    async with house(RESPAWN) as it:
        it.replica("talk").unstoppable = True
        kill(it, "talk")
        await until_live(it, "talk", 0)
        await until_live(it, "talk", 1)
        await it.served("a", "text", "audio")


async def test_the_last_replica_of_a_stage_comes_back() -> None:
    async with house(RESPAWN) as it:
        kill(it, "think")
        await until_live(it, "think", 0)
        it.submit("early", "text")
        assert isinstance(await it.failure("early"), StageUnavailableError)
        await until_live(it, "think", 1)
        await it.served("late", "text")
        await it.assert_empty()


async def test_failed_starts_are_repeated_with_growing_delays() -> None:
    async with house(RESPAWN, failed_starts=3) as it:
        kill(it, "sing")
        await until_live(it, "sing", 0)
        await until_live(it, "sing", 1)
        began = it.launches["sing"][0].began
        pauses = [later - earlier for earlier, later in pairwise(began)]
        assert len(began) == 4
        for number, pause in enumerate(pauses, 1):
            assert pause >= 0.02 * 2**number
        await it.served("a", "text", "audio")


async def test_a_replica_that_never_starts_is_given_up() -> None:
    async with house(Reliability(max_respawns=2), failed_starts=99) as it:
        kill(it, "talk")
        async with asyncio.timeout(5):
            while len(it.launches["talk"][0].began) < 2:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        assert len(it.launches["talk"][0].began) == 2
        await it.served("text goes on", "text")


async def test_a_replica_that_hangs_counts_as_dead() -> None:
    quick = Reliability(max_respawns=3, retry_requests=False, stage_hang_timeout=0.05)
    async with house(quick) as it:
        it.replica("think").hangs = True
        await asyncio.sleep(0.2)
        assert it.pools["think"].live_num_replicas == 1, "an idle replica is left alone"
        it.submit("a", "text")
        failure = await it.failure("a")
        assert isinstance(failure, EngineDeadError)
        assert "no sign of life" in str(failure)
        await until_live(it, "think", 1)
        await it.served("b", "text")


async def test_a_busy_replica_that_answers_lives() -> None:
    quick = Reliability(max_respawns=0, stage_hang_timeout=0.05)
    async with house(quick) as it:
        it.submit("a", "text")
        await asyncio.sleep(0.3)
        assert it.pools["think"].live_num_replicas == 1
        it.abort("a")


async def test_a_request_that_has_said_nothing_is_tried_again() -> None:
    async with house(RETRY, think=2) as it:
        it.submit("a", "text")
        await it.settle()
        first = it.replicas["think"].index(it.at("think", "a"))
        kill(it, "think", first)
        await it.settle()
        other = it.replica("think", 1 - first)
        (attempt,) = other.running
        assert attempt != "a", "late words about the first attempt must not be taken for the second"
        other.step(tokens(attempt, 1, finished=True))
        (message,) = await it.outcome("a")
        assert isinstance(message, Emit) and message.request_id == "a"
        await it.assert_empty()


async def test_a_request_is_tried_only_twice() -> None:
    async with house(RETRY, think=3) as it:
        it.submit("a", "text")
        await it.settle()
        for _ in range(2):
            (index,) = (i for i, each in enumerate(it.replicas["think"]) if each.running)
            it.replica("think", index).running.clear()
            kill(it, "think", index)
            await it.settle()
        assert isinstance(await it.failure("a"), EngineDeadError)
        await it.assert_empty()


async def test_a_request_that_has_spoken_is_not_tried_again() -> None:
    async with house(RETRY, think=2) as it:
        it.submit("a", "text")
        await it.settle()
        index = it.replicas["think"].index(it.at("think", "a"))
        it.replica("think", index).step(tokens("a", 1))
        await it.settle()
        kill(it, "think", index)
        assert isinstance(await it.failure("a"), EngineDeadError)
        await it.assert_empty()


async def test_a_later_stage_is_tried_again_from_the_start() -> None:
    async with house(RETRY, talk=2) as it:
        it.submit("a", "audio")
        await it.settle()
        it.at("think", "a").step(tokens("a", 1))
        await it.settle()
        index = it.replicas["talk"].index(it.at("talk", "a"))
        kill(it, "talk", index)
        await it.settle()
        assert "a" in it.replica("think").aborted
        (attempt,) = it.replica("think").running
        it.replica("think").step(tokens(attempt, 1, finished=True))
        await it.settle()
        it.at("talk", attempt).step(tokens(attempt, 7, finished=True))
        await it.settle()
        it.at("sing", attempt).step(sound(attempt, it.payload(attempt), finished=True))
        (message,) = await it.outcome("a")
        assert isinstance(message, Emit) and message.output.audio is not None
        await it.assert_empty()


async def test_an_abort_reaches_the_second_attempt() -> None:
    async with house(RETRY, think=2) as it:
        it.submit("a", "text")
        await it.settle()
        index = it.replicas["think"].index(it.at("think", "a"))
        kill(it, "think", index)
        await it.settle()
        assert it.replica("think", 1 - index).running
        it.abort("a")
        await it.assert_empty()


async def test_without_another_replica_a_request_fails_at_once() -> None:
    async with house(RETRY) as it:
        it.submit("a", "text")
        await it.settle()
        kill(it, "think")
        assert isinstance(await it.failure("a"), EngineDeadError)
