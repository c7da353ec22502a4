# SPDX-License-Identifier: Apache-2.0
"""Both talkers, in transformers and in vLLM, loaded once."""

import os
from pathlib import Path

import pytest

# Read by vLLM when its modules are imported or an engine is made: engine in this process, and no
# binding of threads to cores.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm.distributed import cleanup_dist_env_and_memory

from tests.models.speech import PIPELINES, Talker
from tests.reference.hf_omni import HFOmni
from vllm_omni.testing.tiny import build

# vLLM makes a process's expert-parallel group with its first engine, if that is an MoE model.
MOE_FIRST = ("qwen3_omni_moe", "qwen2_5_omni")
assert set(MOE_FIRST) == set(PIPELINES)
# An in-process engine takes vLLM's process-wide state with it when it is collected.
_ALIVE: list[Talker] = []


@pytest.fixture(scope="session", params=MOE_FIRST)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="session")
def hf(checkpoint: Path) -> HFOmni:
    return HFOmni(checkpoint)


@pytest.fixture(scope="session")
def talker(checkpoint: Path) -> Talker:
    if not _ALIVE:
        cleanup_dist_env_and_memory()  # what another module's engine may have left
    talker = Talker(checkpoint)
    _ALIVE.append(talker)
    return talker
