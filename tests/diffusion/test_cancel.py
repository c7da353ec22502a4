# SPDX-License-Identifier: Apache-2.0
"""Cancels at any call: nothing of a request is left, and the others do not notice."""

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.rules import Batching, CallRules, Ragged, RaggedOutput
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

CANCELS = 300


class Model(nn.Module):
    """Encodes, denoises and decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(tokens)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + positions.sum()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if not (x < 1000).all():
            raise ArithmeticError("too large")
        return x * 2


def image(ctx: Program) -> None:
    """Like a pipeline: text, steps with previews, an image."""
    model = ctx.component("model", Model)
    steps = ctx.options["steps"]
    ctx.expect("model", steps)
    ctx.expect("model", 1, "decode")
    x = model.encode(torch.randn(1, ctx.options["tokens"], 4)).mean(1)
    x, positions = x.repeat(ctx.options["images"], 1), torch.arange(4.0)
    for step in range(steps):
        x = model(x, positions) + torch.randn(len(x), 4, generator=ctx.generator)
        if step % 3 == 0:
            ctx.emit("image", {"preview": x.clone()}, {})
        if ctx.options["spoil"] == step:
            model.decode(torch.full_like(x, 2000))
    ctx.emit("image", {"image": model.decode(x)}, {})


def stream(ctx: Program) -> None:
    """Like a codec decoder: windows as they come."""
    model = ctx.component("model", Model)
    while True:
        message = ctx.receive()
        history = model.encode(torch.randn(1, ctx.options["tokens"], 4))
        ctx.emit("audio", {"audio": model.decode(history[0])}, {})
        if message.final:
            return


def run(ctx: Program) -> None:
    (stream if ctx.options["stream"] else image)(ctx)


def load(ctx: LoadContext) -> Loaded:
    return Loaded({})


def make_engine() -> Engine:
    rules = {
        "forward": CallRules({"positions": Batching.SHARED}),
        "encode": CallRules({"tokens": Ragged(1)}, RaggedOutput(lambda size: size, dim=1)),
        "decode": CallRules(),
    }
    loaded = Loaded({"model": Component(Model().eval(), rules)})
    return Engine(ProgramSpec("mixed", run, load), loaded, max_batch=4)


def options(chance: random.Random, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "stream": chance.random() < 0.3,
        "tokens": chance.randint(1, 9),
        "images": chance.randint(1, 2),
        "steps": chance.randint(1, 12),
        "spoil": chance.choice([-1, -1, -1, 2]),
    }


def live_tensors() -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


def remembered() -> Iterator[WeakIdKeyDictionary]:
    """What collators still know about tensors."""
    return (each for each in gc.get_objects() if type(each) is WeakIdKeyDictionary and each)


@torch.inference_mode()
def test_random_cancels_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    chance = random.Random(7)
    engine = make_engine()
    before, known = live_tensors(), len(list(remembered()))
    cancelled, names = 0, iter(range(10**6))
    live: list[str] = []
    while cancelled < CANCELS:
        while len(live) < 12:
            name = str(next(names))
            engine.add(name, Message(options(chance, int(name))))
            live.append(name)
        for ended in [each.request_id for each in engine.step() if each.finished]:
            live.remove(ended)
        for name in chance.sample(live, min(2, len(live))):
            if chance.random() < 0.5:
                engine.receive(name, Message(final=chance.random() < 0.3))
            else:
                engine.abort([name])
                live.remove(name)
                cancelled += 1
    engine.abort(live)
    assert engine.step() == [] and len(engine) == 0 and not engine.has_work
    assert live_tensors() <= before
    assert len(list(remembered())) == known


def test_who_stays_does_not_notice_cancels() -> None:
    def last(company: int) -> torch.Tensor:
        chance = random.Random(3)
        torch.manual_seed(0)
        engine = make_engine()
        mine = {**options(chance, 1), "stream": False, "steps": 9, "spoil": -1}
        engine.add("mine", Message(mine))
        for index in range(company):
            engine.add(str(index), Message(options(chance, index)))
        while engine.has_work:
            for emission in engine.step():
                if emission.request_id == "mine" and emission.finished:
                    assert emission.tensors is not None
                    return emission.tensors["image"]
            engine.abort([str(chance.randrange(company))] if company else [])
        raise AssertionError("no image")

    torch.testing.assert_close(last(10), last(0), atol=1e-6, rtol=0)
