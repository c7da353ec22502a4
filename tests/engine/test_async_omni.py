# SPDX-License-Identifier: Apache-2.0
"""`AsyncOmni` over an orchestrator thread and stages in memory (A-46, B-11, B-12, B-13)."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.fakes import PIPELINE, STAGES, FakeReplica, tokens
from vllm_omni.config.plan import DeploymentPlan, StagePlan
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.connectors.shm import SharedMemoryConnector
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.engine.messages import ErrorMessage, Message
from vllm_omni.engine.orchestrator import Topology
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.entrypoints import async_omni
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.errors import OmniClientError, OmniGenerateError
from vllm_omni.outputs import OmniRequestOutput

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

WAIT_S = 5.0
ENDLESS = 1 << 30


class Talkative(FakeReplica):
    """Answers each request by itself: a prompt is the number of its tokens, one per step."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> None:
        await super().submit(request_id, prompt, params, **kwargs)
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self._say, request_id, 1)

    def _say(self, request_id: str, number: int) -> None:
        count = self.running.get(request_id)
        if count is None:
            return
        self.step(tokens(request_id, number, finished=number == count))
        assert self.loop is not None
        self.loop.call_later(0.0005, self._say, request_id, number + 1)

    def die(self) -> None:
        """Die in the next step; from any thread."""
        assert self.loop is not None
        self.dies_in = "outputs"
        self.loop.call_soon_threadsafe(self.step)


def plan() -> DeploymentPlan:
    stages = [
        StagePlan(
            stage=stage,
            stage_id=i,
            num_replicas=1,
            devices=(("cpu",),),
            engine_args={},
            diffusion=None,
            default_sampling={},
            env={},
            input_connectors={},
            output_connectors={},
            sources={},
        )
        for i, stage in enumerate(STAGES)
    ]
    return DeploymentPlan(
        model="fake",
        served_model_names=("fake",),
        pipeline=PIPELINE,
        hf_config=PretrainedConfig(),
        platform="cpu",
        async_chunk=True,
        stages=tuple(stages),
    )


Replicas = list[list[FakeReplica]]


async def nothing() -> None:
    """What clears a cache that is not there."""


def launched(
    plan: DeploymentPlan, thinkers: int = 1, clear_media: Callable[[], Any] = nothing
) -> tuple[LaunchedPipeline, Replicas]:
    """A pipeline that runs, and its replicas."""
    deployment_id = new_deployment_id()
    replicas: Replicas = [[Talkative() for _ in range(thinkers)], [Talkative()], [FakeReplica()]]
    pools = [StagePool(s, i, replicas[i]) for i, s in enumerate(STAGES)]
    topology = Topology(PIPELINE, "fake", PretrainedConfig(), streaming=True, edge_extra={})
    engine = OmniEngine(topology, pools, SharedMemoryConnector(deployment_id))
    entry: Any = SimpleNamespace(
        vllm_config=None,
        model_config=None,
        renderer=SimpleNamespace(clear_mm_cache_async=clear_media),
        input_processor=None,
        close=lambda: None,
    )
    return LaunchedPipeline(plan, engine, entry, deployment_id), replicas


class Served:
    """An `AsyncOmni` and the replicas behind it."""

    def __init__(self, thinkers: int = 1) -> None:
        self.media_cleared = 0
        running, self.replicas = launched(plan(), thinkers, self._clear_media)
        self.engine = running.engine
        self.omni = AsyncOmni(running)

    async def _clear_media(self) -> None:
        self.media_cleared += 1

    @property
    def thinker(self) -> Talkative:
        thinker = self.replicas[0][0]
        assert isinstance(thinker, Talkative)
        return thinker

    def deliver(self, *messages: Message) -> None:
        """As if the orchestrator had sent it."""
        self.engine._outbox.sync_q.put_nowait(list(messages))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    it = Served()
    yield it
    await asyncio.to_thread(it.omni.shutdown, 0)


async def ask(
    served: Served, count: int, request_id: str | None = None, *modalities: str
) -> list[OmniRequestOutput]:
    async with asyncio.timeout(WAIT_S):
        outputs = served.omni.generate(
            count, request_id=request_id, output_modalities=modalities or ("text",)
        )
        return [output async for output in outputs]


def text(outputs: Sequence[OmniRequestOutput]) -> str:
    return "".join(each.outputs[0].text for each in outputs)


async def test_outputs_bear_the_callers_id(served: Served) -> None:
    outputs = await ask(served, 3, "mine")
    assert {output.request_id for output in outputs} == {"mine"}


async def test_a_live_request_id_is_refused(served: Served) -> None:
    async with aclosing(served.omni.generate(ENDLESS, request_id="r")) as first:
        await anext(first)
        with pytest.raises(OmniClientError, match="in use") as caught:
            await ask(served, 2, "r")
        assert caught.value.param == "request_id"
        await anext(first)
    await served.until(lambda: not served.thinker.running)


async def test_a_request_id_may_come_again_at_once(served: Served) -> None:
    """Right behind the first one's abort, while its last steps are on their way."""
    for _ in range(50):
        async with aclosing(served.omni.generate(ENDLESS, request_id="r")) as first:
            assert (await anext(first)).outputs[0].text == "<1>"
        assert text(await ask(served, 3, "r")) == "<1><2><3>"
        assert text(await ask(served, 2, "r")) == "<1><2>"
    await served.until(lambda: not served.thinker.running)


async def test_a_caller_that_never_reads_blocks_nobody(served: Served) -> None:
    async with aclosing(served.omni.generate(5000)) as unread:
        await anext(unread)
        assert text(await ask(served, 3)) == "<1><2><3>"
        await served.until(lambda: served.omni._streams != {})
        assert text(await ask(served, 4)) == "<1><2><3><4>"


@pytest.mark.parametrize("outputs", [0, 1, 5])
async def test_a_caller_that_leaves_stops_its_request(served: Served, outputs: int) -> None:
    started = asyncio.Event()

    async def caller() -> None:
        started.set()
        count = 0
        async for _ in served.omni.generate(ENDLESS):
            count += 1
            if count > outputs:
                break

    task = asyncio.create_task(caller())
    await started.wait()
    if outputs == 0:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    await served.until(lambda: not served.thinker.running)
    assert served.omni._streams == served.omni._inner_ids == {}


async def test_an_aborted_request_ends_for_its_caller(served: Served) -> None:
    task = asyncio.create_task(ask(served, ENDLESS, "r"))
    await served.until(lambda: bool(served.thinker.running))
    await served.omni.abort(["r", "unknown"])
    with pytest.raises(OmniGenerateError, match="request r was aborted"):
        await task
    await served.until(lambda: not served.thinker.running)


async def test_errors_of_unknown_requests_are_dropped(served: Served) -> None:
    await ask(served, 1)
    served.deliver(
        ErrorMessage(error="gone", request_id="unknown", fatal=True),
        ErrorMessage(error="nobody's", request_id=None),
    )
    assert text(await ask(served, 2)) == "<1><2>"
    assert served.omni.is_running


async def test_a_fatal_error_of_the_engine_ends_everything(served: Served) -> None:
    task = asyncio.create_task(ask(served, ENDLESS))
    await served.until(lambda: bool(served.thinker.running))
    served.deliver(ErrorMessage(error="broken", fatal=True, cause=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        await task
    assert served.omni.errored
    with pytest.raises(EngineDeadError, match="Orchestrator process is not alive"):
        await served.omni.check_health()
    with pytest.raises(EngineDeadError):
        await ask(served, 1)


async def test_a_bug_of_the_orchestrator_is_not_silent(served: Served) -> None:
    """Whatever a replica raises that is no death of its own."""
    await ask(served, 1)

    served.thinker.health = ZeroDivisionError("a bug")
    await served.until(lambda: served.omni.errored)


async def test_without_a_talker_text_is_served_and_health_says_so(served: Served) -> None:
    await served.omni.check_health()
    running = asyncio.create_task(ask(served, ENDLESS, None, "text", "audio"))
    await served.until(lambda: bool(served.replicas[1][0].running))
    talker = served.replicas[1][0]
    assert isinstance(talker, Talkative)
    talker.die()
    with pytest.raises(EngineDeadError, match="died in outputs"):
        await running
    with pytest.raises(EngineDeadError, match="Stage-1 has no live replica"):
        await served.omni.check_health()
    assert served.omni.is_running
    assert not served.omni.errored
    assert [stage.live_replicas for stage in served.omni.stages] == [1, 0, 1]
    assert text(await ask(served, 2)) == "<1><2>"


async def test_one_of_two_replicas_is_enough_for_health() -> None:
    served = Served(thinkers=2)
    try:
        await ask(served, 1)
        served.thinker.die()
        await served.until(lambda: served.omni.stages[0].live_replicas == 1)
        await served.omni.check_health()
        assert text(await ask(served, 2)) == "<1><2>"
        assert served.media_cleared == 1, "its successor would lack media that are not sent again"
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


@pytest.mark.parametrize("in_thread", [True, False])
async def test_shutdown_fails_what_runs(in_thread: bool) -> None:
    served = Served()
    tasks = [asyncio.create_task(ask(served, ENDLESS)) for _ in range(3)]
    await served.until(lambda: len(served.thinker.running) == 3)
    if in_thread:
        await asyncio.to_thread(served.omni.shutdown, 0)
    else:
        served.omni.shutdown(0)
    served.omni.shutdown(0)
    for task in tasks:
        with pytest.raises(OmniGenerateError, match="shut"):
            await task
    with pytest.raises(EngineDeadError):
        await ask(served, 1)
    assert [r.shutdowns for rs in served.replicas for r in rs] == [[0]] * 3


async def test_calls_reach_every_replica_that_offers_them() -> None:
    served = Served(thinkers=2)

    async def add(left: int, right: int) -> int:
        return left + right

    async def fail(*_: Any) -> None:
        raise ZeroDivisionError("no")

    try:
        for replica in served.replicas[0]:
            replica.offers = {"collective_rpc": add, "sleep": fail}
        assert await served.omni._call("collective_rpc", 1, right=2) == [3, 3]
        with pytest.raises(ZeroDivisionError):
            await served.omni.sleep()
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


def test_stages_end_if_the_front_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = dataclasses.replace(plan().stages[0], default_sampling={"temperature": -1})
    broken = dataclasses.replace(plan(), stages=(stage, *plan().stages[1:]))
    running, replicas = launched(broken)
    monkeypatch.setattr(async_omni, "launch_pipeline", lambda _: running)
    with pytest.raises(VLLMValidationError, match="temperature must be non-negative"):
        AsyncOmni.from_plan(broken)
    assert not running.engine.alive
    assert all(replica.shutdowns for stage in replicas for replica in stage)


async def test_shutdown_fails_calls(served: Served) -> None:
    called = asyncio.Event()

    async def waits(*_: Any) -> None:
        called.set()
        await asyncio.Event().wait()

    served.thinker.offers = {"sleep": waits}
    task = asyncio.create_task(served.omni.sleep())
    await served.until(called.is_set)
    await asyncio.to_thread(served.omni.shutdown, 0)
    with pytest.raises(EngineDeadError):
        async with asyncio.timeout(WAIT_S):
            await task
