# SPDX-License-Identifier: Apache-2.0
"""A request's own noise schedule equals that of a stock pipeline built with it (A-42, A-44)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import FrozenDict

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import MIXED, Ask, load, served, stock
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.schedule import check_strength, set_schedule
from vllm_omni.diffusion.spec import Loaded
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.testing.diffusers_tiny import Example, build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]
FAMILY = "wan22_t2v"


@dataclass(frozen=True, slots=True)
class Scheduled(Ask):
    """With parameters of the schedule, which the stock `__call__` does not take."""

    schedule: dict[str, float] = field(default_factory=dict)

    def arguments(self, example: Example) -> dict[str, object]:
        return {**Ask.arguments(self, example), **self.schedule}


@contextmanager
def built_with(loaded: Loaded, schedule: dict[str, float]) -> Iterator[DiffusionPipeline]:
    """The stock pipeline as if its checkpoint had this schedule."""
    pipeline = loaded.assets["kit"].base
    before, ratio = pipeline.scheduler, pipeline.config.boundary_ratio
    shift = {n: v for n, v in schedule.items() if n == "flow_shift"}
    pipeline.scheduler = type(before).from_config(before.config, **shift)
    pipeline.register_to_config(boundary_ratio=schedule.get("boundary_ratio", ratio))
    yield pipeline
    pipeline.scheduler = before
    pipeline.register_to_config(boundary_ratio=ratio)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(build(FAMILY, CHECKPOINTS / "diffusers" / FAMILY), "WanPipeline")


def test_schedules_of_one_batch(loaded: Loaded) -> None:
    (example, *_) = recipe(FAMILY).examples
    plain = replace(MIXED[0], steps=3)
    schedules = ({}, {"flow_shift": 9.0}, {"boundary_ratio": 0.2}, {"flow_shift": 1.0})
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    made = served(loaded, example, [Scheduled(**fields, schedule=each) for each in schedules])
    wanted = []
    for schedule in schedules:
        with built_with(loaded, schedule):
            wanted.append(stock(loaded, example, plain))
    for own, reference in zip(made, wanted, strict=True):
        torch.testing.assert_close(own, reference, atol=1e-4, rtol=0)
    different = [not torch.allclose(each["video"], wanted[0]["video"]) for each in wanted[1:]]
    assert different == [True] * 3


@pytest.mark.parametrize("name", ["flow_shift", "boundary_ratio"])
def test_what_would_change_nothing_is_refused(loaded: Loaded, name: str) -> None:
    kit: Kit = loaded.assets["kit"]
    parts: dict[str, Any] = {**kit.parts, "transformer_2": None}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipeline = type(kit.base)(**{**parts, "boundary_ratio": 0.5})
    with pytest.raises(OmniClientError) as refused:
        set_schedule(pipeline, parts, OmniDiffusionSamplingParams(**{name: 0.5}))
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("name", "strength", "least"),
    [
        ("FluxImg2ImgPipeline", 0.0, "above 0"),
        ("FluxImg2ImgPipeline", 0.01, None),
        ("WanVideoToVideoPipeline", 0.2, "at least 0.25"),
        ("WanVideoToVideoPipeline", 0.25, None),
        ("LTXConditionPipeline", 0.0, None),
    ],
)
def test_an_edit_without_a_step_is_refused(name: str, strength: float, least: str | None) -> None:
    pipeline = object.__new__(getattr(diffusers, name))
    vars(pipeline)["_internal_dict"] = FrozenDict()
    if least is None:
        check_strength(pipeline, {"strength": strength}, 4)
        return
    with pytest.raises(OmniClientError, match=f"`strength`: .*{least}"):
        check_strength(pipeline, {"strength": strength}, 4)
