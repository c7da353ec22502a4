# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the whole suite: tiny checkpoints, and a process fit for forking engines."""

import os

# Before torch and vLLM are imported: engines are forked from this process, and a fork does not
# carry OpenMP's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

CHECKPOINTS = Path(os.environ.get("VLLM_OMNI_TEST_CHECKPOINTS", "/tmp/vllm-omni-tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[[str], Path]:
    """Builds (once) and returns the tiny checkpoint of a family."""
    from vllm_omni.testing.tiny import build

    return lambda family: build(family, CHECKPOINTS / family)
