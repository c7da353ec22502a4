# SPDX-License-Identifier: Apache-2.0
"""`AsyncOmni` over an orchestrator thread and stages in memory (A-46, B-11, B-12, B-13)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY
from transformers import PretrainedConfig
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.fakes import DELTAS, FAULTY_TOKEN, PIPELINE, STAGES, FakeReplica, tokens
from vllm_omni.config.limits import ServingLimits
from vllm_omni.config.plan import DeploymentPlan, StagePlan
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.connectors.shm import SharedMemoryConnector
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.engine.messages import Emit, ErrorMessage, Message
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.topology import Topology
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.front_door import EngineClosedError
from vllm_omni.errors import (
    DeadlineExceededError,
    OmniGenerateError,
    OverloadedError,
    SlowClientError,
    http_status,
)
from vllm_omni.outputs import AudioOutput, OmniRequestOutput

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

WAIT_S = 5.0
DEFAULT_LIMITS = ServingLimits()
ENDLESS = 1 << 30


class Talkative(FakeReplica):
    """Answers each request by itself: a prompt is the number of its tokens, one per step."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> None:
        await super().submit(request_id, prompt, params, **kwargs)
        self.loop = asyncio.get_running_loop()
        self.loop.call_soon(self._say, request_id, 1, kwargs["emit"])

    def _say(self, request_id: str, number: int, emit: bool) -> None:
        count = self.running.get(request_id)
        if count is None:
            return
        said = FAULTY_TOKEN + 1 if emit and number == FAULTY_TOKEN else number
        self.step(tokens(request_id, said, finished=number == count))
        assert self.loop is not None
        self.loop.call_later(0.0005, self._say, request_id, number + 1, emit)

    def die(self) -> None:
        """Die in the next step; from any thread."""
        assert self.loop is not None
        self.dies_in = "outputs"
        self.loop.call_soon_threadsafe(self.step)


def plan(limits: ServingLimits = DEFAULT_LIMITS) -> DeploymentPlan:
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
        limits=limits,
    )


Replicas = list[list[FakeReplica]]


def launched(
    plan: DeploymentPlan,
    thinkers: int = 1,
    stage_bounds: Sequence[int | None] = (None, None, None),
) -> tuple[LaunchedPipeline, Replicas]:
    """A pipeline that runs, and its replicas."""
    deployment_id = new_deployment_id()
    replicas: Replicas = [[Talkative() for _ in range(thinkers)], [Talkative()], [FakeReplica()]]
    pools = [
        StagePool(stage, i, replicas[i], max_requests=stage_bounds[i])
        for i, stage in enumerate(STAGES)
    ]
    topology = Topology(PIPELINE, "fake", PretrainedConfig(), streaming=True, edge_extra={})
    engine = OmniEngine(topology, pools, SharedMemoryConnector(deployment_id))
    entry: Any = SimpleNamespace(
        vllm_config=None,
        model_config=None,
        renderer=None,
        input_processor=None,
        tell_media_cache=lambda: None,
    )
    return LaunchedPipeline(plan, engine, entry, deployment_id), replicas


class Served:
    """An `AsyncOmni` and the replicas behind it."""

    def __init__(
        self,
        thinkers: int = 1,
        limits: ServingLimits = DEFAULT_LIMITS,
        stage_bounds: Sequence[int | None] = (None, None, None),
    ) -> None:
        running, self.replicas = launched(plan(limits), thinkers, stage_bounds)
        self.engine = running.engine
        self.omni = AsyncOmni.of(running)

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
            count, DELTAS, request_id, output_modalities=modalities or ("text",)
        )
        return [output async for output in outputs]


def text(outputs: Sequence[OmniRequestOutput]) -> str:
    return "".join(each.outputs[0].text for each in outputs)


async def test_outputs_bear_the_callers_id(served: Served) -> None:
    outputs = await ask(served, 3, "mine")
    assert {output.request_id for output in outputs} == {"mine"}


async def test_a_live_request_id_may_be_used_again(served: Served) -> None:
    """A client that retries sends its id again while the first request still runs."""
    async with aclosing(served.omni.generate(ENDLESS, DELTAS, request_id="r")) as first:
        await anext(first)
        assert text(await ask(served, 2, "r")) == "<1><2>"
        await anext(first)
    await served.until(lambda: not served.thinker.running)


async def test_an_abort_ends_all_requests_of_an_id(served: Served) -> None:
    tasks = [asyncio.create_task(ask(served, ENDLESS, "r")) for _ in range(3)]
    other = asyncio.create_task(ask(served, ENDLESS, "other"))
    await served.until(lambda: len(served.thinker.running) == 4)
    await served.omni.abort("r")
    for task in tasks:
        with pytest.raises(OmniGenerateError, match="request r was aborted"):
            await task
    await served.until(lambda: len(served.thinker.running) == 1)
    assert not other.done()
    other.cancel()


async def test_a_request_id_may_come_again_at_once(served: Served) -> None:
    """Right behind the first one's abort, while its last steps are on their way."""
    for _ in range(50):
        async with aclosing(served.omni.generate(ENDLESS, DELTAS, request_id="r")) as first:
            assert (await anext(first)).outputs[0].text.startswith("<1>")
        assert text(await ask(served, 3, "r")) == "<1><2><3>"
        assert text(await ask(served, 2, "r")) == "<1><2>"
    await served.until(lambda: not served.thinker.running)


async def test_a_caller_that_never_reads_blocks_nobody(served: Served) -> None:
    """Unread text is joined: it takes the memory of its tokens and no more."""
    async with aclosing(served.omni.generate(1000, DELTAS)) as unread:
        await anext(unread)
        assert text(await ask(served, 3)) == "<1><2><3>"
        await served.until(lambda: not served.thinker.running)
        assert text(await ask(served, 4)) == "<1><2><3><4>"
        rest = [output async for output in unread]
    assert len(rest) <= 3
    assert text(rest).endswith("<999><1000>")
    assert rest[-1].finished


async def test_sound_that_nobody_reads_ends_its_request() -> None:
    served = Served(limits=ServingLimits(max_stream_buffer_bytes=200_000))
    try:
        before = slow_clients()
        outputs = served.omni.generate(ENDLESS, DELTAS, output_modalities=["text", "audio"])
        async with aclosing(outputs) as unread:
            await anext(unread)
            singer = served.replicas[2][0]
            await served.until(lambda: bool(singer.running))
            (inner_id,) = served.omni._streams
            for _ in range(3):
                audio = AudioOutput(np.zeros(20_000, np.float32), 24_000)
                piece = OmniRequestOutput(inner_id, final_output_type="audio", audio=audio)
                served.deliver(Emit(inner_id, piece))
            await served.until(lambda: not served.thinker.running and not singer.running)
            with pytest.raises(SlowClientError, match="max-stream-buffer-bytes"):
                async for _ in unread:
                    pass
        assert slow_clients() == before + 1
        assert text(await ask(served, 2)) == "<1><2>"
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


def slow_clients() -> float:
    return REGISTRY.get_sample_value("vllm_omni:requests_slow_client_total") or 0.0


async def test_a_request_ends_at_its_deadline(served: Served) -> None:
    """In every stage, whether its caller reads or not."""
    outputs = served.omni.generate(
        ENDLESS, DELTAS, output_modalities=["text", "audio"], timeout=0.3
    )
    async with aclosing(outputs) as unread:
        await anext(unread)
        assert served.thinker.running
        await served.until(lambda: not any(r.running for rs in served.replicas for r in rs))
        with pytest.raises(DeadlineExceededError):
            async for _ in unread:
                pass


async def test_who_waits_longer_than_it_may_never_starts() -> None:
    served = Served(limits=ServingLimits(max_num_queued_reqs=25))
    try:
        running = [asyncio.create_task(ask(served, ENDLESS)) for _ in range(24)]
        await served.until(lambda: len(served.thinker.running) == 24)
        outputs = served.omni.generate(1, timeout=0.05)
        with pytest.raises(DeadlineExceededError, match="before its turn"):
            await anext(outputs)
        for task in running:
            task.cancel()
        await served.until(lambda: not served.thinker.running)
        assert served.omni.admission.running == served.omni.admission.waiting == 0
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


async def test_more_requests_than_may_wait_are_refused_and_the_others_have_their_turn() -> None:
    """The stages of this deployment can work on 3 * 8 requests at a time."""
    served = Served(limits=ServingLimits(max_num_queued_reqs=30))
    try:
        tasks = [asyncio.create_task(ask(served, 20, f"r{i}")) for i in range(40)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [result for result in results if isinstance(result, OverloadedError)]
        assert len(refused) == 40 - 24 - 3, "one client may have half of the places"
        assert {http_status(error) for error in refused} == {429}
        assert sum(isinstance(result, list) for result in results) == 27
        assert served.omni.admission.retry_after_s() >= 1
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


async def test_an_aborted_request_that_waits_never_starts() -> None:
    served = Served(limits=ServingLimits(max_num_queued_reqs=26))
    try:
        running = [asyncio.create_task(ask(served, ENDLESS, "r")) for _ in range(24)]
        await served.until(lambda: len(served.thinker.running) == 24)
        waiting = asyncio.create_task(ask(served, 1, "w"))
        await served.until(lambda: served.omni.admission.waiting == 1)
        await served.omni.abort("w")
        await served.omni.abort("r")
        await asyncio.gather(*running, return_exceptions=True)
        with pytest.raises(OmniGenerateError, match="request w was aborted"):
            await waiting
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


async def test_a_full_stage_refuses_and_goes_on() -> None:
    served = Served(stage_bounds=(2, None, None))
    try:
        running = [asyncio.create_task(ask(served, ENDLESS)) for _ in range(2)]
        await served.until(lambda: len(served.thinker.running) == 2)
        with pytest.raises(OverloadedError, match="stage 'think' is busy"):
            await ask(served, 1)
        for task in running:
            task.cancel()
        await served.until(lambda: not served.thinker.running)
        assert text(await ask(served, 2)) == "<1><2>"
    finally:
        await asyncio.to_thread(served.omni.shutdown, 0)


@pytest.mark.parametrize("outputs", [0, 1, 5])
async def test_a_caller_that_leaves_stops_its_request(served: Served, outputs: int) -> None:
    started = asyncio.Event()

    async def caller() -> None:
        started.set()
        count = 0
        async for _ in served.omni.generate(ENDLESS, DELTAS):
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
    for closed in (lambda: ask(served, 1), served.omni.check_health, served.omni.sleep):
        with pytest.raises(EngineClosedError, match=r"^this AsyncOmni is closed"):
            await closed()
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


async def test_shutdown_fails_calls(served: Served) -> None:
    called = asyncio.Event()

    async def waits(*_: Any) -> None:
        called.set()
        await asyncio.Event().wait()

    served.thinker.offers = {"sleep": waits}
    task = asyncio.create_task(served.omni.sleep())
    await served.until(called.is_set)
    await asyncio.to_thread(served.omni.shutdown, 0)
    with pytest.raises(EngineClosedError):
        async with asyncio.timeout(WAIT_S):
            await task
