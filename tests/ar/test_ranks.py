# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine core that fail: the stage does, at once and with the reason."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from tests.ar.test_respawn import launch_of, next_tokens
from tests.processes import command_line, family, has_ended
from vllm_omni.ar.replica import ArReplica
from vllm_omni.start_report import StartFailure

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SHARED_MEMORY = Path("/dev/shm")


def shared_memory(processes: list[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    maps = [each.path for process in processes for each in process.memory_maps(grouped=True)]
    return {path for path in maps if Path(path).is_relative_to(SHARED_MEMORY)}


async def lose_a_rank(replica: ArReplica, rank: int) -> None:
    """Kill a rank in the middle of an answer."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    await replica.submit("a", {"prompt": "hello"}, params)
    async with asyncio.timeout(60):
        await next_tokens(replica)
        assert replica.llm.core is not None and replica.llm.core.pid is not None
        processes = family(replica.llm.core.pid)
        (lost,) = (each for each in processes if f"Worker_TP{rank}" in command_line(each))
        os.kill(lost.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="'thinker' has ended"):
            while True:
                await next_tokens(replica)
    await asyncio.to_thread(replica.shutdown, 0)
    _, left = psutil.wait_procs(processes, 20)
    assert all(has_ended(each) for each in left)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_the_end_of_its_engine_core(
    rank: int, tiny_checkpoint: Callable[[str], Path]
) -> None:
    """Whichever it is; the others would wait for it for ever, and nothing is left of any."""
    launch = launch_of(tiny_checkpoint("qwen3_omni_moe"), tensor_parallel_size=2)
    replica = launch.begin().ready()
    try:
        assert replica.llm.core is not None and replica.llm.core.pid is not None
        mapped = shared_memory(family(replica.llm.core.pid))
        assert mapped, "ranks speak through shared memory"
        with asyncio.Runner() as runner:
            runner.run(lose_a_rank(replica, rank))
        assert not [path for path in mapped if Path(path).exists()]
    finally:
        launch.close()


def test_a_start_fails_with_what_a_rank_raised(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint("qwen3_omni_moe"), broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    launch = launch_of(broken, tensor_parallel_size=2)
    try:
        with pytest.raises(StartFailure, match="SafetensorError"):
            launch.begin().ready()
    finally:
        launch.close()
