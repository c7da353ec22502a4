# SPDX-License-Identifier: Apache-2.0
"""Sizes of a stage's parallelism: how they may be written, and the devices that they need."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.ledger import Ledger
from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.config.section import Engine
from vllm_omni.errors import OmniConfigError

from .conftest import GPUS, Planner

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

PICTURES = Pipeline(
    name="pictures",
    architectures=(),
    stages=(Stage("painter", engine="diffusion", program="toy:paint", takes_generation=True),),
)


def only(**values: Any) -> dict[str, Any]:
    return {"stages": [{"stage_id": 0, **values}]}


@pytest.mark.parametrize(
    ("deploy", "flags"),
    [
        (only(devices="0,1,2,3", cfg_parallel_size=2, ulysses_degree=2), {}),
        (only(devices="0,1,2,3"), {"cfg_parallel_size": 2, "ulysses_degree": 2}),
        (
            only(
                devices="0,1,2,3",
                engine_extras={
                    "parallel_config": {
                        "cfg_parallel_size": 2,
                        "ulysses_degree": 2,
                        "tensor_parallel_size": 1,
                        "ring_degree": 1,
                    }
                },
            ),
            {},
        ),
        (
            only(devices="0,1,2,3", cfg_parallel_size=2, parallel_config={"ulysses_degree": 2}),
            {},
        ),
    ],
)
def test_sizes_as_keys_flags_and_one_mapping(
    plan: Planner, deploy: dict[str, Any], flags: dict[str, Any]
) -> None:
    (painter,) = plan(deploy, pipeline=PICTURES, host=GPUS, cli=flags).stages
    assert painter.devices == (("0", "1", "2", "3"),)
    assert painter.diffusion is not None
    sizes = painter.diffusion.of_pipeline()
    assert (sizes["cfg_parallel_size"], sizes["ulysses_degree"]) == (2, 2)
    assert sizes["tensor_parallel_size"] == 1


def test_replicas_have_devices_of_their_own(plan: Planner) -> None:
    deploy = only(devices="0,1,2,3", num_replicas=2, tensor_parallel_size=2)
    (painter,) = plan(deploy, pipeline=PICTURES, host=GPUS).stages
    assert painter.devices == (("0", "1"), ("2", "3"))


def test_only_tensor_parallelism_divides_weights(plan: Planner) -> None:
    deploy = only(devices="0,1,2,3", tensor_parallel_size=2, cfg_parallel_size=2)
    stages = plan(deploy, pipeline=PICTURES, host=GPUS).stages
    claims = Ledger.of(stages, lambda stage: 100).claims
    assert [claims[device][0].weights for device in "0123"] == [50, 0, 0, 0]


def test_ranks_share_a_cpu(plan: Planner) -> None:
    (painter,) = plan(pipeline=PICTURES, cli={"ulysses_degree": 4}).stages
    assert painter.devices == (("cpu",) * 4,)


@pytest.mark.parametrize(
    ("below", "above", "sizes"),
    [
        ({"cfg_parallel_size": 4}, {"parallel_config": {"cfg_parallel_size": 2}}, (2, 1)),
        ({"parallel_config": {"cfg_parallel_size": 4}}, {"cfg_parallel_size": 2}, (2, 1)),
        (
            {"parallel_config": {"cfg_parallel_size": 4, "ulysses_degree": 2, "ring_degree": 1}},
            {"parallel_config": {"cfg_parallel_size": 1}},
            (1, 2),
        ),
    ],
)
def test_a_file_is_over_its_base_in_whatever_form(
    plan: Planner,
    tmp_path: Path,
    below: dict[str, Any],
    above: dict[str, Any],
    sizes: tuple[int, int],
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(json.dumps(only(devices="0,1", **below)))
    deploy = {"base_config": str(base), **only(**above)}
    (painter,) = plan(deploy, pipeline=PICTURES, host=GPUS).stages
    assert painter.diffusion is not None
    found = painter.diffusion
    assert (found.cfg_parallel_size, found.ulysses_degree) == sizes


@pytest.mark.parametrize("engine", ["ar", "diffusion"])
def test_sizes_of_the_other_engine_are_said_to_have_no_effect(
    plan: Planner, caplog: pytest.LogCaptureFixture, engine: Engine
) -> None:
    stage = Stage("a", engine=engine, arch="X") if engine == "ar" else PICTURES.stages[0]
    pipeline = Pipeline(name="one", architectures=(), stages=(stage,))
    other = "ulysses_degree" if engine == "ar" else "pipeline_parallel_size"
    with caplog.at_level(logging.WARNING):
        plan(only(**{other: 2}), pipeline=pipeline, host=GPUS)
    assert other in caplog.text and "no effect" in caplog.text


@pytest.mark.parametrize(
    ("deploy", "message"),
    [
        (
            only(devices="0,1", ulysses_degree=2, cfg_parallel_size=2),
            r"cfg_parallel_size = 2 .*ulysses_degree = 2 .*needs 4 device\(s\), but .* \"0,1\"",
        ),
        (
            only(ulysses_degree=2, parallel_config={"ulysses_degree": 4}),
            "'ulysses_degree' is given twice: 2 in the stage and 4 in parallel_config",
        ),
        (
            only(engine_extras={"parallel_config": {"ulises_degree": 4}}),
            "ulises_degree = 4: unknown key; did you mean 'ulysses_degree'",
        ),
        (only(cfg_parallel_size=0), "cfg_parallel_size = 0"),
    ],
)
def test_what_cannot_be(plan: Planner, deploy: dict[str, Any], message: str) -> None:
    with pytest.raises(OmniConfigError, match=message):
        plan(deploy, pipeline=PICTURES, host=GPUS)


def test_a_size_without_effect_is_said(plan: Planner, caplog: pytest.LogCaptureFixture) -> None:
    deploy = only(parallel_config={"ring_degree": 2})
    with caplog.at_level(logging.WARNING):
        plan(deploy, pipeline=PICTURES)
    assert "ring_degree: accepted, has no effect yet" in caplog.text


def test_a_codecs_decoder_is_not_meant(plan: Planner, caplog: pytest.LogCaptureFixture) -> None:
    devices = ("0,1", "2,3", "0")
    deploy = {"stages": [{"stage_id": i, "devices": d} for i, d in enumerate(devices)]}
    memory = {"gpu_memory_utilization": 0.4}
    plans = plan(deploy, host=GPUS, cli={"tensor_parallel_size": 2, **memory}).stages
    assert [each.devices for each in plans] == [(("0", "1"),), (("2", "3"),), (("0",),)]
    assert plans[2].diffusion is not None and plans[2].diffusion.tensor_parallel_size == 1
    assert "no effect" not in caplog.text
