# SPDX-License-Identifier: Apache-2.0
"""Engine cores that their host spawns, as on CUDA, instead of forking them (issue 6)."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.ar.test_respawn import answer_and_die, launch_of
from vllm_omni.start_report import StartFailure

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]


def test_a_spawned_core_serves_and_says_why_it_does_not(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    """It answers as a forked one does; one that cannot start tells the reason itself, of which its
    host would only know an exit code."""
    model = tiny_checkpoint("qwen3_omni_moe")
    forked = launch_of(model)
    spawned = dataclasses.replace(forked, start_method="spawn")
    try:
        with asyncio.Runner() as runner:
            replicas = [launch.begin() for launch in (forked, spawned)]
            first, second = (runner.run(answer_and_die(each.ready())) for each in replicas)
            assert first == second
    finally:
        forked.close()
    hopeless = dataclasses.replace(launch_of(model, kv_cache_memory_bytes=1), start_method="spawn")
    with pytest.raises(StartFailure, match="No available memory") as caught:
        hopeless.begin().ready()
    assert any("EngineCore failed to start" in line for line in caught.value.log)
    hopeless.close()
    stages = [
        each
        for each in psutil.Process().children(recursive=True)
        if "EngineCore" in each.name() or "OmniHost" in each.name()
    ]
    # One that has ended is there until the fork server, which is told of it too, has asked how.
    assert not psutil.wait_procs(stages, timeout=10)[1]
