# SPDX-License-Identifier: Apache-2.0
"""Stages whose processes are killed: what fails, what goes on, and what is left (B-02, B-12)."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoProcessor
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from tests.dfx.deployments import config
from tests.dfx.probe import children, leftovers
from tests.parity.harness import Deployment
from vllm_omni.ar.replica import ArReplica
from vllm_omni.config.plan import Reliability
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.errors import StageUnavailableError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

# A kill is noticed within half a second; the rest is room for a busy machine.
AT_ONCE_S = 10.0
SAMPLES_PER_FRAME = 1920
STAY_DEAD = Reliability(max_respawns=0, retry_requests=False)


class Victim:
    """A deployment, and what its requests give."""

    def __init__(self, model: Path, thinkers: int) -> None:
        self.running = Deployment(
            model, deploy_config=config((thinkers, 1, 1)), async_chunk=True, reliability=STAY_DEAD
        )
        self.omni = self.running.omni
        messages = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
        self.prompt = AutoProcessor.from_pretrained(model).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )

    def pid(self, stage_id: int, replica_id: int) -> int:
        replica = self.omni._engine.pools[stage_id].replica(replica_id)
        if isinstance(replica, DiffusionReplica):
            return replica.pid
        assert isinstance(replica, ArReplica)
        assert replica.llm.core is not None and replica.llm.core.pid is not None
        return replica.llm.core.pid

    def replica_of(self, stage_id: int, request_id: str) -> int | None:
        inner = next(iter(self.omni._inner_ids.get(request_id, ())), None)
        return None if inner is None else self.omni._engine.pools[stage_id].bound_replica_id(inner)

    async def ask(
        self, audio: bool, max_tokens: int = 8, request_id: str | None = None
    ) -> tuple[list[int], np.ndarray]:
        tokens: list[int] = []
        sound = [np.zeros(0, np.float32)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        talker = {"temperature": 0, "max_tokens": 8, "min_tokens": 8, "seed": None}
        if max_tokens > 100:
            talker |= {"max_tokens": 1000, "min_tokens": 1000}
        async for output in self.omni.generate(
            {"prompt": self.prompt},
            params,
            request_id,
            sampling_params_list=[None, talker, None],
            output_modalities=("text", "audio") if audio else ("text",),
        ):
            if output.final_output_type == "text":
                tokens = list(output.outputs[0].token_ids)
            elif output.audio is not None:
                sound.append(output.audio.samples)
        return tokens, np.concatenate(sound)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def kill(
        self, stage_id: int, replica_id: int, doomed: Sequence[asyncio.Task[Any]]
    ) -> list[BaseException]:
        """Kill a stage's process; returns what the doomed requests raise."""
        os.kill(self.pid(stage_id, replica_id), signal.SIGKILL)
        began = time.monotonic()
        raised = await asyncio.gather(*doomed, return_exceptions=True)
        pool = self.omni._engine.pools[stage_id]
        await self.until(lambda: replica_id not in pool.live_replica_ids)
        assert time.monotonic() - began < AT_ONCE_S
        return raised

    async def text_is_served(self, expected: list[int]) -> None:
        assert (await self.ask(audio=False))[0] == expected


async def one_of_two_thinkers(it: Victim, expected: tuple[list[int], np.ndarray]) -> None:
    """Its requests fail; the other's go on, and so does the service as a whole."""
    tasks = {
        name: asyncio.create_task(it.ask(audio=False, max_tokens=1500, request_id=name))
        for name in ("a", "b", "c", "d")
    }
    await it.until(lambda: all(it.replica_of(0, name) is not None for name in tasks))
    doomed = [task for name, task in tasks.items() if it.replica_of(0, name) == 0]
    kept = [task for name, task in tasks.items() if it.replica_of(0, name) == 1]
    assert len(doomed) == len(kept) == 2
    for raised in await it.kill(0, 0, doomed):
        assert isinstance(raised, EngineDeadError)
    await it.omni.check_health()
    assert [stage.live_replicas for stage in it.omni.stages] == [1, 1, 1]
    tokens, sound = await it.ask(audio=True)
    assert tokens == expected[0]
    assert np.abs(sound - expected[1]).max() < 1e-4
    # The front end of the dead one still prepares prompts for all.
    await it.omni.renderer.render_cmpl_async([{"prompt": it.prompt}])
    for task in kept:
        assert len((await task)[0]) == 1500


async def the_decoder(it: Victim, expected: tuple[list[int], np.ndarray]) -> None:
    """Requests that are heard fail, whichever stage they are in; text goes on."""
    heard = [
        asyncio.create_task(it.ask(audio=True, max_tokens=1500, request_id=f"heard-{i}"))
        for i in range(2)
    ]
    read = asyncio.create_task(it.ask(audio=False, max_tokens=300))
    await it.until(lambda: all(it.replica_of(2, f"heard-{i}") == 0 for i in range(2)))
    for raised in await it.kill(2, 0, heard):
        assert isinstance(raised, EngineDeadError)
        assert "code2wav" in str(raised)
    with pytest.raises(EngineDeadError, match="Stage-2 has no live replica"):
        await it.omni.check_health()
    assert len((await read)[0]) == 300
    with pytest.raises(StageUnavailableError, match="Stage-2 has no live replica"):
        await it.ask(audio=True)


async def the_talker(it: Victim, expected: tuple[list[int], np.ndarray]) -> None:
    """It dies while nothing is asked of it."""
    await it.kill(1, 0, [])
    with pytest.raises(EngineDeadError, match="Stage-1 has no live replica"):
        await it.omni.check_health()
    with pytest.raises(StageUnavailableError, match="Stage-1 has no live replica"):
        await it.ask(audio=True)


async def the_last_thinker(it: Victim, expected: tuple[list[int], np.ndarray]) -> None:
    task = asyncio.create_task(it.ask(audio=False, max_tokens=1500, request_id="last"))
    await it.until(lambda: it.replica_of(0, "last") is not None)
    (raised,) = await it.kill(0, 1, [task])
    assert isinstance(raised, EngineDeadError)
    with pytest.raises(EngineDeadError, match="Stage-0 has no live replica"):
        await it.omni.check_health()
    with pytest.raises(StageUnavailableError, match="Stage-0 has no live replica"):
        await it.ask(audio=False)


def test_killed_processes_take_only_their_own_requests(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    before = children()
    it = Victim(tiny_checkpoint("qwen3_omni_moe"), thinkers=2)
    try:
        expected = it.running.run(it.ask(audio=True))
        assert len(expected[1])
        for death in (one_of_two_thinkers, the_decoder, the_talker):
            it.running.run(death(it, expected))
            it.running.run(it.text_is_served(expected[0]))
            assert it.omni.is_running
            assert not it.omni.errored
        it.running.run(the_last_thinker(it, expected))
        assert it.omni._streams == it.omni._inner_ids == {}
        assert all(pool._bound == {} for pool in it.omni._engine.pools)
    finally:
        it.running.close()
    assert leftovers(it.omni) == {}
    _, alive = psutil.wait_procs(children() - before, timeout=10)
    assert not alive


def test_shutdown_while_requests_run(tiny_checkpoint: Callable[[str], Path]) -> None:
    """They fail, and nothing of the deployment is left."""
    before = children()
    it = Victim(tiny_checkpoint("qwen3_omni_moe"), thinkers=1)

    async def shut_down() -> list[Any]:
        tasks = [
            asyncio.create_task(it.ask(audio=audio, max_tokens=1500, request_id=str(i)))
            for i, audio in enumerate((True, True, False))
        ]
        await it.until(lambda: it.replica_of(2, "0") == 0)
        await asyncio.to_thread(it.omni.shutdown)
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        raised = it.running.run(shut_down())
    finally:
        it.running.close()
    assert all("shut" in str(each) for each in raised), raised
    assert leftovers(it.omni) == {}
    _, alive = psutil.wait_procs(children() - before, timeout=10)
    assert not alive
