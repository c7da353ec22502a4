# SPDX-License-Identifier: Apache-2.0
"""The orchestrator over stages in memory: batching, and faults that stay where they belong."""

import asyncio
import os
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from tests.engine.fakes import EdgeFault, House, house, sound, tokens
from vllm_omni.engine import orchestrator
from vllm_omni.engine.messages import Emit, ErrorMessage, Shutdown
from vllm_omni.errors import OmniClientError, OmniGenerateError, StageUnavailableError
from vllm_omni.outputs import ErrorInfo

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


@pytest.fixture(autouse=True)
def no_request_is_counted_as_running() -> Iterator[None]:
    """However requests end, the gauge comes back to where it was."""
    name = "vllm_omni:num_requests_running"
    before = REGISTRY.get_sample_value(name) or 0
    yield
    assert (REGISTRY.get_sample_value(name) or 0) == before


async def test_a_request_visits_its_stages_and_leaves_nothing() -> None:
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.replica("think").step(tokens("r", 1))
        await it.settle()
        assert it.replica("talk").running, "the next stage starts with the first output"
        it.replica("think").step(tokens("r", 2, finished=True))
        it.replica("talk").step(tokens("r", 7))
        await it.settle()
        it.replica("sing").step(sound("r", it.payload("r")))
        it.replica("talk").step(tokens("r", 8, finished=True))
        await it.settle()
        it.replica("sing").step(sound("r", it.payload("r"), finished=True))
        messages = await it.outcome("r")
        assert [m.output.final_output_type for m in messages] == ["text", "text", "audio", "audio"]
        assert [m.last for m in messages] == [False, False, False, True]
        assert [m.stage for m in messages[-1].output.stage_metrics] == ["think", "talk", "sing"]
        assert it.replica("talk").updates == [["r"]]
        assert it.replica("sing").updates == [["r"]]
        await it.assert_empty()
        assert not any(it.replica(stage).aborted for stage in it.replicas)


async def test_a_text_request_visits_no_other_stage() -> None:
    async with house() as it:
        messages = await it.served("r", "text")
        assert [m.last for m in messages] == [True]
        assert not it.replica("talk").updates
        assert [m.stage for m in messages[-1].output.stage_metrics] == ["think"]
        await it.assert_empty()


async def test_one_update_per_replica_and_step() -> None:
    async with house(talk=2) as it:
        ids = ["a", "b", "c", "d"]
        for request_id in ids:
            it.submit(request_id)
        await it.settle()
        for token in (1, 2, 3):
            it.replica("think").step(*(tokens(i, token) for i in ids))
            await it.settle()
        assert it.replica("talk", 0).updates == [["a", "c"]] * 2
        assert it.replica("talk", 1).updates == [["b", "d"]] * 2


async def test_outputs_that_come_together_reach_the_next_stage_in_order() -> None:
    """A replica that was waited for in vain gives several steps' outputs at once."""
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.replica("think").step(tokens("r", 1), tokens("r", 2), tokens("r", 3, finished=True))
        await it.settle()
        assert list(it.replica("talk").running) == ["r"]
        assert it.replica("talk").updates == [["r", "r"]]
        it.abort("r")


async def test_an_output_of_a_released_request_frees_its_payload() -> None:
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.abort("r")
        await it.settle()
        it.payload("r")
        it.replica("think").step(tokens("r", 1))
        await it.settle()
        assert it.connector.cleanup("r") == 0


# Faults that belong to one request.


async def test_a_fault_at_an_edges_start_fails_its_request_alone() -> None:
    async with house() as it:
        it.submit("bad", voice="broken")
        assert isinstance(await it.failure("bad"), EdgeFault)
        await it.served("good", "text", "audio")
        await it.assert_empty()


async def test_a_fault_of_an_edge_fails_its_request_alone() -> None:
    async with house() as it:
        it.submit("bad")
        it.submit("good")
        await it.settle()
        it.replica("think").step(tokens("bad", 13), tokens("good", 1))
        assert isinstance(await it.failure("bad"), EdgeFault)
        await it.settle()
        assert it.replica("think").aborted == ["bad"]
        assert list(it.replica("talk").running) == ["good"]
        it.abort("good")
        await it.assert_empty()


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (OmniClientError("too long", 413, "TooLong"), 413, "TooLong"),
        (OmniClientError("no"), 400, "BadRequestError"),
        (ValueError("vLLM says no"), None, None),
        (RuntimeError("broken"), None, None),
    ],
)
async def test_a_refused_submit_fails_its_request_alone(
    raised: Exception, status: int | None, kind: str | None
) -> None:
    async with house() as it:
        it.replica("think").refuses = raised
        it.submit("r")
        message = (await it.outcome("r"))[-1]
        assert isinstance(message, ErrorMessage)
        assert (message.status_code, message.error_type, message.fatal) == (status, kind, False)
        assert message.to_exception() is raised
        it.replica("think").refuses = None
        await it.served("s", "text", "audio")
        await it.assert_empty()


@pytest.mark.parametrize("status", [400, 403, 413, 422, 429])
async def test_a_programs_client_error_keeps_status_and_type(status: int) -> None:
    async with house() as it:
        failed = await _failed_by_program(
            it, ErrorInfo(message="m", status_code=status, error_type="T")
        )
        assert isinstance(failed, OmniClientError)
        assert (failed.status_code, failed.error_type, str(failed)) == (status, "T", "m")


@pytest.mark.parametrize("status", [None, 399, 500, 503])
async def test_a_programs_other_error_is_the_servers(status: int | None) -> None:
    async with house() as it:
        failed = await _failed_by_program(it, ErrorInfo(message="m", status_code=status))
        assert isinstance(failed, OmniGenerateError | StageUnavailableError)
        assert str(failed) == "m"


async def _failed_by_program(it: House, error: ErrorInfo) -> BaseException:
    it.submit("r")
    await it.settle()
    it.replica("think").step(tokens("r", 1))
    await it.settle()
    it.replica("talk").step(tokens("r", 7))
    await it.settle()
    it.replica("sing").step(sound("r", error=error))
    failed = await it.failure("r")
    await it.assert_empty()
    assert it.replica("think").aborted == it.replica("talk").aborted == ["r"]
    return failed


# Replicas that die.


async def _at_every_stage(it: House, ids: list[str]) -> None:
    for request_id in ids:
        it.submit(request_id)
    await it.settle()
    for replica in it.replicas["think"]:
        replica.step(*(tokens(i, 1) for i in replica.running))
    await it.settle()


@pytest.mark.parametrize(
    ("stage", "method"),
    [
        ("think", "submit"),
        ("think", "outputs"),
        ("think", "check_health"),
        ("talk", "submit"),
        ("talk", "update"),
        ("talk", "outputs"),
        ("talk", "check_health"),
    ],
)
async def test_a_dead_replica_takes_only_its_own_requests(
    stage: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "HEALTH_INTERVAL_S", 0.01)
    async with house(think=2, talk=2) as it:
        await _at_every_stage(it, ["a", "b", "c", "d"])
        dying, other = it.replicas[stage]
        lost, kept = list(dying.running), list(other.running)
        assert len(lost) == len(kept) == 2
        dying.dies_in = method
        if method == "submit":
            it.submit("e")
            await it.settle()
            if stage == "talk":
                it.at("think", "e").step(tokens("e", 1))
            lost.append("e")
        elif method == "update":
            for replica in it.replicas["think"]:
                replica.step(*(tokens(i, 2) for i in replica.running))
        elif method == "outputs":
            dying.step(tokens(lost[0], 5))
        for request_id in lost:
            message = (await it.outcome(request_id))[-1]
            assert isinstance(message, ErrorMessage)
            assert isinstance(message.cause, EngineDeadError | StageUnavailableError)
        await it.settle()
        assert dying.shutdowns == [0]
        assert it.pools[stage].live_num_replicas == 1
        assert list(other.running) == kept
        for request_id in kept:
            assert request_id in it.orchestrator._states
        await it.served("f", "text", "audio")
        it.abort(*kept)
        await it.assert_empty()


async def test_updates_reach_the_replicas_that_live() -> None:
    """One replica's death in the middle of a step costs the others nothing."""
    async with house(talk=2) as it:
        await _at_every_stage(it, ["a", "b"])
        it.replica("talk", 0).dies_in = "update"
        it.replica("think").step(tokens("a", 2), tokens("b", 2))
        assert isinstance(await it.failure("a"), EngineDeadError)
        await it.settle()
        assert it.replica("talk", 1).updates == [["b"]]
        assert "b" in it.orchestrator._states
        it.abort("b")


async def test_requests_on_their_way_to_a_dying_replica_fail() -> None:
    """Those whose prompt is still being processed when others notice its death."""
    async with house(think=2) as it:
        dying, other = it.replicas["think"]
        dying.gate = asyncio.Event()
        for request_id in "abcd":
            it.submit(request_id)
        await it.settle()
        lost = [i for i in "abcd" if i not in other.running]
        dying.dies_in = "outputs"
        dying.step()
        for request_id in lost:
            assert isinstance(await it.failure(request_id), EngineDeadError)
        dying.dies_in = "submit"
        dying.gate.set()
        await it.settle()
        assert set(it.orchestrator._states) == set(other.running)
        it.abort(*"abcd")
        await it.assert_empty()


async def test_text_is_served_without_a_talker() -> None:
    async with house() as it:
        it.submit("a")
        await it.settle()
        it.replica("think").step(tokens("a", 1))
        await it.settle()
        it.replica("talk").dies_in = "outputs"
        it.replica("talk").step()
        assert isinstance(await it.failure("a"), EngineDeadError)
        await it.served("b", "text")
        it.submit("c")
        await it.settle()
        it.replica("think").step(tokens("c", 1))
        message = (await it.outcome("c"))[-1]
        assert message.error == "Stage-1 has no live replica"
        assert isinstance(message.to_exception(), StageUnavailableError)
        await it.assert_empty()


async def test_requests_about_to_enter_a_stage_fail_with_its_last_replica() -> None:
    async with house() as it:
        it.submit("a")
        it.submit("b")
        await it.settle()
        gate = it.replica("talk").gate = asyncio.Event()
        it.replica("think").step(tokens("a", 1), tokens("b", 1))
        await it.settle()
        it.replica("talk").dies_in = "outputs"
        it.replica("talk").step()
        for request_id in ("a", "b"):
            assert isinstance(await it.failure(request_id), EngineDeadError)
        gate.set()
        await it.assert_empty()


async def test_no_request_is_taken_without_a_first_stage() -> None:
    async with house() as it:
        it.replica("think").dies_in = "outputs"
        it.replica("think").step()
        await it.settle()
        await asyncio.sleep(0.05)
        it.submit("r", "text")
        message = (await it.outcome("r"))[-1]
        assert message.error == "Stage-0 has no live replica"
        await it.assert_empty()


# Aborts.


async def test_abort_right_behind_the_submit() -> None:
    async with house() as it:
        it.submit("r")
        it.abort("r")
        await it.settle()
        assert it.replica("think").running == {}
        await it.assert_empty()


async def test_abort_while_the_prompt_is_processed() -> None:
    async with house() as it:
        gate = it.replica("think").gate = asyncio.Event()
        it.submit("r")
        await it.settle()
        it.abort("r")
        await it.settle()
        assert it.replica("think").aborted == ["r"]
        gate.set()
        await it.assert_empty()


async def test_abort_between_stages() -> None:
    """While the request enters its second stage."""
    async with house() as it:
        gate = it.replica("talk").gate = asyncio.Event()
        it.submit("r")
        await it.settle()
        it.replica("think").step(tokens("r", 1))
        await it.settle()
        it.abort("r")
        await it.settle()
        assert it.replica("think").aborted == it.replica("talk").aborted == ["r"]
        gate.set()
        await it.assert_empty()


@pytest.mark.parametrize("ended", ["think", "talk"])
async def test_abort_after_a_stage_has_ended(ended: str) -> None:
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.replica("think").step(tokens("r", 1, finished=True))
        await it.settle()
        it.replica("talk").step(tokens("r", 7, finished=ended == "talk"))
        await it.settle()
        it.abort("r", "unknown")
        await it.assert_empty()
        assert it.replica("think").aborted == []
        assert it.replica("talk").aborted == ([] if ended == "talk" else ["r"])
        assert it.replica("sing").aborted == ["r"]


async def test_shared_memory_of_an_aborted_request_is_freed() -> None:
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.payload("r")
        it.payload("other")
        it.abort("r")
        await it.settle()
        assert it.connector.cleanup("r") == 0
        assert it.connector.cleanup("other") == 1


async def test_shutdown_fails_what_runs() -> None:
    async with house() as it:
        await _at_every_stage(it, ["a"])
        it.submit("b", "text")
        await it.settle()
        it.send(Shutdown(1.5))
        await asyncio.wait_for(it.task, 5)
        for request_id in ("a", "b"):
            failed = await it.failure(request_id)
            assert isinstance(failed, OmniGenerateError)
            assert "shutting down" in str(failed)
        assert [r.shutdowns for rs in it.replicas.values() for r in rs] == [[1.5]] * 3
        names = [n for n in os.listdir("/dev/shm") if it.connector._deployment_id in n]
        assert names == []


async def test_a_silent_modality_ends_too() -> None:
    """A stage that ends without input for the next one ends the request."""
    async with house() as it:
        it.submit("r")
        await it.settle()
        it.replica("think").step(tokens("r", finished=True))
        messages = await it.outcome("r")
        assert [m.output.final_output_type for m in messages] == ["text", "audio"]
        assert messages[-1].last
        assert all(isinstance(m, Emit) and m.output.finished for m in messages)
        await it.assert_empty()
