# SPDX-License-Identifier: Apache-2.0
"""How `AsyncOmni` comes to be."""

import asyncio
import dataclasses
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from tests.engine.test_async_omni import launched, plan
from vllm_omni import AsyncOmni
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.entrypoints import front_door

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


async def test_takes_the_arguments_of_omni(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def build(model: str, **given: Any) -> DeploymentPlan:
        asked.append((model, given))
        return plan()

    def launch(*_: Any) -> LaunchedPipeline:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()  # vLLM would start its own tasks in it
        return running

    running, _ = launched(plan())
    monkeypatch.setattr(front_door, "build_plan", build)
    monkeypatch.setattr(front_door, "launch_pipeline", launch)
    omni = AsyncOmni(model="fake", deploy_config={"async_chunk": True}, max_num_seqs=3)
    try:
        said = [output async for output in omni.generate(2, output_modalities=["text"])]
        assert "".join(output.outputs[0].text for output in said) == "<1><2>"
    finally:
        await asyncio.to_thread(omni.shutdown, 0)
    ((model, given),) = asked
    assert (model, given["deploy_config"]) == ("fake", {"async_chunk": True})
    assert (given["cli"], given["flag_style"]) == ({"max_num_seqs": 3}, "{name}")


def test_stages_end_if_the_front_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = dataclasses.replace(plan().stages[0], default_sampling={"temperature": -1})
    broken = dataclasses.replace(plan(), stages=(stage, *plan().stages[1:]))
    running, replicas = launched(broken)
    monkeypatch.setattr(front_door, "launch_pipeline", lambda *_: running)
    with pytest.raises(VLLMValidationError, match="temperature must be non-negative"):
        AsyncOmni.from_plan(broken)
    assert not running.engine.alive
    assert all(replica.shutdowns for stage in replicas for replica in stage)
