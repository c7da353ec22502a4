# SPDX-License-Identifier: Apache-2.0
"""A made-up pipeline, a checkpoint that is a config only, and machines to plan for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config import idle
from vllm_omni.config.build import build_plan
from vllm_omni.config.devices import Host
from vllm_omni.config.pipeline import Edge, Pipeline, Stage
from vllm_omni.config.plan import DeploymentPlan

PIPELINE = Pipeline(
    name="toy",
    architectures=("ToyForConditionalGeneration",),
    stages=(
        Stage(
            "thinker", engine="ar", arch="ToyThinker", final_output="text", shared_sections=("",)
        ),
        Stage(
            "talker",
            engine="ar",
            arch="ToyTalker",
            shared_sections=("",),
            needs="audio",
            row_driven=True,
            default_sampling={"temperature": 0.9, "top_k": 50, "extra_args": {"frames": 1}},
            sampling_constraints=lambda config: {"detokenize": False},
        ),
        Stage("decoder", engine="diffusion", program="toy:decode", final_output="audio"),
    ),
    edges=(
        Edge("thinker", "talker", lambda ctx: None),
        Edge("talker", "decoder", lambda ctx: None),
    ),
)
SINGLE = Pipeline(
    name="single", architectures=(), stages=(Stage("only", engine="ar", shared_sections=("",)),)
)

CPU = Host("cpu", 0)
GPUS = Host("cuda", 4)

Planner = Callable[..., DeploymentPlan]


def write_checkpoint(folder: Path, **config: Any) -> str:
    """A folder with a `config.json` and nothing else."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen2", "architectures": ["ToyForConditionalGeneration"], **config}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return write_checkpoint(tmp_path / "checkpoint", dtype="float32")


@pytest.fixture
def plan(checkpoint: str) -> Planner:
    """`build_plan` for the made-up pipeline; on a CPU unless told otherwise."""

    def make(deploy_config: Any = None, *, pipeline: Pipeline = PIPELINE, **kwargs: Any) -> Any:
        kwargs.setdefault("host", CPU)
        return build_plan(
            checkpoint,
            deploy_config=deploy_config if deploy_config is not None else {},
            resolve=lambda *args, **kw: pipeline,
            **kwargs,
        )

    return make


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that are given once per process are given in each test."""
    monkeypatch.setattr(idle, "_warned", set())
