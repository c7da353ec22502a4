# SPDX-License-Identifier: Apache-2.0
"""A request that fails, fails alone: memory, numbers, guardrails (A-44, A-45)."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from tests.diffusion.schedulers import unhurried
from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.failures import is_out_of_memory
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec
from vllm_omni.errors import GuardrailViolationError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


class Limited(nn.Module):
    """A model that has memory for so many rows at a time, and spoils rows above 100.

    Args:
        rows: Most rows that fit.
        allocate: What it calls when more come; None to raise as an accelerator does.
    """

    def __init__(self, rows: int, allocate: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.rows, self.allocate = rows, allocate
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(x))
        if len(x) > self.rows:
            if self.allocate is None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.allocate()
        return torch.where(x > 100, torch.nan, x + 1)


def load(ctx: LoadContext) -> Loaded:
    return Loaded({})


def run(ctx: Program) -> None:
    if ctx.options.get("forbidden"):
        raise GuardrailViolationError("no such pictures", param="prompt")
    model = ctx.component("model", Limited)
    x = torch.full((ctx.options.get("rows", 1), 4), float(ctx.seed))
    for _ in range(3):
        x = model(x)
    if ctx.options.get("hoard"):
        torch.empty(2**50)
    ctx.emit("image", {"image": x, "size": torch.tensor([4])}, {})


def made_by(model: Limited, **requests: dict[str, object]) -> dict[str, Emission]:
    engine = Engine(
        ProgramSpec("painter", run, load),
        Loaded({"model": Component(model)}),
        scheduler=unhurried(),
    )
    for name, options in requests.items():
        engine.add(name, Message(options))
    ends = {}
    while engine.has_work:
        for emission in engine.step():
            ends[emission.request_id] = emission
    assert len(engine) == 0 and ends.keys() == requests.keys()
    return ends


def seeds(count: int) -> dict[str, dict[str, object]]:
    return {f"r{seed}": {"seed": seed} for seed in range(count)}


def assert_right(ends: dict[str, Emission], but: set[str] | None = None) -> None:
    for name, emission in ends.items():
        if name not in (but or set()):
            assert emission.error is None and emission.tensors is not None
            assert (emission.tensors["image"] == float(name[1:]) + 3).all()


@pytest.mark.parametrize(
    "allocate", [None, lambda: torch.empty(2**50), lambda: np.empty(2**50)], ids=str
)
def test_a_batch_without_memory_is_halved_and_that_remembered(
    allocate: Callable[[], object] | None,
) -> None:
    model = Limited(3, allocate)
    assert_right(made_by(model, **seeds(8)))
    assert model.batches == [8, 4, 2, 2, 4, 2, 2, *[2] * 8]


def test_a_request_too_large_fails_alone_with_503(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ends = made_by(Limited(4), **seeds(5), huge={"seed": 0, "rows": 9})
    assert_right(ends, but={"huge"})
    error = ends["huge"].error
    assert error is not None
    assert error.status_code == 503 and "not enough memory" in error.message
    assert "no memory for a batch of 6 calls" in caplog.text


def test_no_memory_outside_of_a_component_is_503_too() -> None:
    ends = made_by(Limited(9), **seeds(2), hoarder={"seed": 0, "hoard": True})
    assert_right(ends, but={"hoarder"})
    error = ends["hoarder"].error
    assert error is not None and error.status_code == 503


def test_results_that_are_no_numbers_fail_alone() -> None:
    ends = made_by(Limited(9), **seeds(3), spoilt={"seed": 101})
    assert_right(ends, but={"spoilt"})
    spoilt = ends["spoilt"]
    assert spoilt.tensors is None and spoilt.error is not None
    assert spoilt.error.status_code is None
    assert spoilt.error.message == "painter failed: image has values that are not finite numbers"


def test_a_guardrail_fails_alone_with_its_own_message() -> None:
    ends = made_by(Limited(9), **seeds(3), bad={"forbidden": True})
    assert_right(ends, but={"bad"})
    error = ends["bad"].error
    assert error is not None and (error.message, error.status_code) == ("no such pictures", 400)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("DefaultCPUAllocator: "),
    ],
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
