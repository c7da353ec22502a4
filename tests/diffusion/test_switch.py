# SPDX-License-Identifier: Apache-2.0
"""Thread-local torch state stays with the program that set it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[object, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(state())
        return self.linear(x)


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_device(),
        torch.get_default_dtype(),
        torch.empty(0).device,
    )


def set_dtype() -> AbstractContextManager[None]:
    torch.set_default_dtype(torch.float64)
    return torch.no_grad()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": torch.no_grad,
    "grad": torch.enable_grad,
    "no inference": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "dtype": set_dtype,
}


def run(ctx: Program) -> None:
    linear = ctx.component("linear", Linear)
    before = state()
    with CONTEXTS[ctx.request_id.split(".")[0]]():
        inside = state()
        for _ in range(ctx.options["calls"]):
            result = linear(torch.ones(1, 4, device="cpu", dtype=torch.float32))
            assert state() == inside
            ctx.emit("audio", {"x": result}, {})
        if ctx.options["stay"]:
            ctx.receive()
            ctx.receive()
            assert state() == inside
    torch.set_default_dtype(before[5])
    assert state() == before


def load(ctx: LoadContext) -> Loaded:
    return Loaded({})


def test_states_do_not_leak_at_switches() -> None:
    outside = state()
    linear = Linear()
    engine = Engine(ProgramSpec("p", run, load), Loaded({"linear": Component(linear)}))
    for index, name in enumerate((*CONTEXTS, *(f"{name}.again" for name in CONTEXTS))):
        engine.add(name, Message({"calls": 1 + index % 4, "stay": index % 2 == 0}))
    dtypes: dict[str, set[torch.dtype]] = {}
    errors = []
    for _ in range(20):
        for emission in engine.step():
            errors += [emission.error] if emission.error else []
            if emission.tensors is not None:
                dtypes.setdefault(emission.request_id, set()).add(emission.tensors["x"].dtype)
        assert state() == outside
    assert not errors
    for index, name in enumerate((*CONTEXTS, *(f"{name}.again" for name in CONTEXTS))):
        if index % 2 == 0 and index % 4 == 0:
            engine.abort([name])
            assert state() == outside
        else:
            engine.receive(name, Message(final=True))
    assert not [e for e in engine.step() if e.error]
    assert len(engine) == 0 and state() == outside
    # Forwards run in inference mode and in float32, under autocast for those who asked for it.
    assert {seen[1] for seen in linear.seen} == {True}
    assert {seen[5] for seen in linear.seen} == {torch.float32}
    expected = {name: {torch.bfloat16 if "autocast" in name else torch.float32} for name in dtypes}
    assert dtypes == expected
