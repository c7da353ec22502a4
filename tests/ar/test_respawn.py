# SPDX-License-Identifier: Apache-2.0
"""Replicas that take the place of dead ones, again and again: nothing adds up (issue 3)."""

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams
from vllm.transformers_utils.processor import cached_get_processor

from vllm_omni.ar.launch import ArLaunch, Told, engine_config, preload, prepare_platform
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.outputs import TokenOutput
from vllm_omni.pipelines.qwen3_omni_moe import PIPELINE

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

STARTS = 3
GROWTH_BYTES = 6 << 20
"""Of the last start. One takes 0.1 MB; tokenizers, processors and their warm-up made anew took 10
to 100 MB."""


def launch_of(model: Path) -> ArLaunch:
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
    }
    place = ArStageConfig(stage="thinker", deployment_id=new_deployment_id())
    return ArLaunch.of(engine_config(place, args), os.environ, told=Told(metrics=True))


async def answer(replica: ArReplica) -> list[int]:
    """Its first tokens; the front end has the prompt to tokenize."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    await replica.submit("a", {"prompt": "hello"}, params)
    tokens: list[int] = []
    async with asyncio.timeout(60):
        while len(tokens) < 4:
            for output in await replica.outputs():
                assert isinstance(output, TokenOutput)
                tokens += output.new_token_ids
    return tokens


def kill(replica: ArReplica) -> None:
    """End its engine core, and what is left of it."""
    assert replica.llm.core is not None and replica.llm.core.pid is not None
    os.kill(replica.llm.core.pid, signal.SIGKILL)
    replica.shutdown(0)


def test_respawns_share_what_prepares_prompts(
    tiny_checkpoint: Callable[[str], Path],
) -> None:
    launch = launch_of(tiny_checkpoint("qwen3_omni_moe"))
    answers, front_ends, processors, memory = [], [], [], []
    with asyncio.Runner() as runner:
        for _ in range(STARTS):
            replica = launch.begin().ready()
            answers.append(runner.run(answer(replica)))
            kill(replica)
            runner.run(asyncio.sleep(0))  # the loop forgets it
            front_ends.append(weakref.ref(replica.llm))
            del replica
            gc.collect()
            processors.append(cached_get_processor.cache_info().currsize)
            memory.append(psutil.Process().memory_info().rss)
    assert answers == [answers[0]] * STARTS
    assert processors == [processors[0]] * STARTS, "vLLM keeps each that is made"
    assert all(each() is None for each in front_ends[:-1])
    assert memory[-1] - memory[-2] < GROWTH_BYTES, memory
    launch.close()
