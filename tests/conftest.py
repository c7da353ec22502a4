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
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.reference.hf_omni import Reference

torch.set_num_threads(1)

CHECKPOINTS = Path(os.environ.get("VLLM_OMNI_TEST_CHECKPOINTS", "/tmp/vllm-omni-tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[[str], Path]:
    """Builds (once) and returns the tiny checkpoint of a family."""
    from vllm_omni.testing.tiny import build

    return lambda family: build(family, CHECKPOINTS / family)


@pytest.fixture(scope="session")
def reference_answers(
    tiny_checkpoint: Callable[[str], Path],
) -> Callable[[str], "dict[str, Reference]"]:
    """transformers' own answers to all of `tests.parity.cases`, by case; made once per family.

    To be called after a test's engines were started: they are forked from this process.
    """
    from tests.models.speech import talker_mask
    from tests.parity.cases import cases
    from tests.reference.hf_omni import HFOmni

    @cache
    def answers(family: str) -> "dict[str, Reference]":
        reference = HFOmni(tiny_checkpoint(family))
        with talker_mask(reference):
            return {
                case.name: reference.run(
                    case.messages,
                    case.media,
                    max_tokens=case.max_tokens,
                    talker_max_tokens=case.talker_max_tokens,
                    repetition_penalty=1.05,
                )
                for case in cases()
            }

    return answers


LEVELS = ("core_model", "advanced_model", "full_model")
"""Run levels, each including the ones before it (row I-01)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-level",
        choices=LEVELS,
        default="advanced_model",
        help="run tests marked with this level or one below it; unmarked tests always run",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    highest = LEVELS.index(config.getoption("--run-level"))
    above = LEVELS[highest + 1 :]
    for item in items:
        if wanted := next((level for level in above if item.get_closest_marker(level)), None):
            item.add_marker(pytest.mark.skip(reason=f"needs --run-level {wanted}"))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
