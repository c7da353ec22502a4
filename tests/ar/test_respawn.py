# SPDX-License-Identifier: Apache-2.0
"""Replicas that take the place of dead ones, again and again: nothing adds up (issue 3)."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm import SamplingParams
from vllm.transformers_utils.processor import cached_get_processor
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.ar.launch import ArLaunch, Told, engine_config, preload, prepare_platform
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.outputs import TokenOutput
from vllm_omni.pipelines.qwen3_omni_moe import PIPELINE

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

STARTS = 3
TOKENS = 4
GROWTH_BYTES = 6 << 20
"""Of the last start. One takes 0.1 MB; tokenizers, processors and their warm-up made anew took 10
to 100 MB."""


def launch_of(model: Path, **changes: Any) -> ArLaunch:
    prepare_platform()
    preload([PIPELINE.architectures[0]])
    args = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "kv_cache_memory_bytes": 16 << 20,
        "mm_processor_cache_gb": 0,
        **changes,
    }
    place = ArStageConfig(stage="thinker", deployment_id=new_deployment_id())
    return ArLaunch.of(engine_config(place, args), os.environ, told=Told(metrics=True))


async def answer_and_die(replica: ArReplica) -> list[int]:
    """The first tokens of a text that the front end has to tokenize, then its engine core's end."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    await replica.submit("a", {"prompt": "hello"}, params)
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while len(tokens) < TOKENS:
            tokens += await next_tokens(replica)
        assert replica.llm.core is not None and replica.llm.core.pid is not None
        os.kill(replica.llm.core.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while True:
                await next_tokens(replica)
    await asyncio.to_thread(replica.shutdown, 0)
    return tokens[:TOKENS]


async def next_tokens(replica: ArReplica) -> list[int]:
    outputs = await replica.outputs()
    return [t for each in outputs if isinstance(each, TokenOutput) for t in each.new_token_ids]


async def has_gone(dead: "weakref.ref[Any]") -> bool:
    """Whether nothing keeps it. The loop has a few callbacks yet to run."""
    for _ in range(50):
        if dead() is None:
            return True
        await asyncio.sleep(0.02)
    return False


def test_respawns_add_nothing(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Replicas die with a request and are replaced: what prepares prompts is made once, and the
    dead ones are gone at once, with their sockets and threads."""
    launch = launch_of(tiny_checkpoint("qwen3_omni_moe"))
    answers, processors, memory = [], [], []
    gc.disable()  # a server has so many long-lived objects that full collections are rare
    try:
        with asyncio.Runner() as runner:
            for _ in range(STARTS):
                replica = launch.begin().ready()
                answers.append(runner.run(answer_and_die(replica)))
                dead = weakref.ref(replica)
                del replica
                assert runner.run(has_gone(dead))
                processors.append(cached_get_processor.cache_info().currsize)
                memory.append(psutil.Process().memory_info().rss)
    finally:
        gc.enable()
        launch.close()
    assert answers == [answers[0]] * STARTS
    assert processors == [processors[0]] * STARTS, "vLLM keeps each that is made"
    assert memory[-1] - memory[-2] < GROWTH_BYTES, memory
