# SPDX-License-Identifier: Apache-2.0
"""What the engine promises, with a toy component."""

import gc
import logging
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vllm_omni.diffusion.calls import Batch, Call
from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.policy import Policy
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec
from vllm_omni.errors import OmniClientError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


class Toy(nn.Module):
    """A model that refuses an infinite input, whoever else is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.batches: list[int] = []

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        self.batches.append(len(x))
        if not x.isfinite().all():
            raise ArithmeticError("not finite")
        return torch.tanh(self.linear(x)) + shift

    def walk(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """A sampling loop of the model's own."""
        for _ in range(steps):
            x = self(x)
        return x


def load(ctx: LoadContext) -> Loaded:
    return Loaded({})


def make_engine(
    run: Callable[[Program], None], module: nn.Module | None = None, **limits: Any
) -> Engine:
    torch.manual_seed(0)
    loaded = Loaded({"toy": Component(module or Toy().eval())}, {"asset": 5})
    return Engine(ProgramSpec("toy", run, load), loaded, **limits)


def drain(engine: Engine) -> dict[str, list[Emission]]:
    made: dict[str, list[Emission]] = {}
    while engine.has_work:
        for emission in engine.step():
            made.setdefault(emission.request_id, []).append(emission)
    return made


def walk(ctx: Program) -> None:
    """Its own noise, its own number of steps, one piece per step."""
    toy = ctx.component("toy", Toy)
    x = torch.randn(1, 4, generator=ctx.generator)
    for step in range(ctx.options["steps"]):
        x = toy(x)
        ctx.emit("audio", {"x": x}, {"step": step})


def last(emissions: list[Emission]) -> torch.Tensor:
    tensors = emissions[-1].tensors
    assert tensors is not None
    return tensors["x"]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 4))
def test_batched_equals_alone(steps: list[int], max_batch: int) -> None:
    together = make_engine(walk, max_batch=max_batch)
    for seed, count in enumerate(steps):
        together.add(str(seed), Message({"seed": seed, "steps": count}))
    made = drain(together)
    for seed, count in enumerate(steps):
        alone = make_engine(walk)
        alone.add("r", Message({"seed": seed, "steps": count}))
        torch.testing.assert_close(
            last(made[str(seed)]), last(drain(alone)["r"]), atol=1e-6, rtol=0
        )
        assert [e.finished for e in made[str(seed)]] == [False] * (count - 1) + [True]
    assert max(together.forward_sizes) == min(max_batch, len(steps))


def test_a_components_own_loop_parks_at_each_of_its_calls() -> None:
    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Toy)
        assert isinstance(toy, Toy) and toy.linear.in_features == 4 and not toy.training
        x = toy.walk(torch.ones(1, 4), ctx.options["steps"])
        ctx.emit("audio", {"x": x}, {"asset": ctx.assets["asset"]})

    engine = make_engine(run)
    engine.add("a", Message({"steps": 3}))
    engine.add("b", Message({"steps": 5}))
    made = drain(engine)
    assert engine.forward_sizes == {2: 3, 1: 2}
    assert last(made["a"]).is_inference()


def test_an_inline_loop_keeps_its_state_and_its_random_numbers() -> None:
    class Sampler(Toy):
        """Draws a number per step, and counts its steps on itself."""

        def walk(self, x: torch.Tensor, steps: int) -> torch.Tensor:
            self.done = 0
            for _ in range(steps):
                x = self(x) + torch.rand(1) + self.done
                self.done += 1
            return x

    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Sampler)
        x = toy(torch.ones(1, 4))
        ctx.emit("audio", {"x": toy.walk(x, ctx.options["steps"])}, {})

    def sample(asked: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        toy = Sampler().eval()
        rules = {"forward": CallRules(), "walk": CallRules(inline=True)}
        loaded = Loaded({"toy": Component(toy, rules)})
        engine = Engine(ProgramSpec("toy", run, load), loaded)
        for seed in asked:
            engine.add(str(seed), Message({"seed": seed, "steps": 3 + seed}))
        made = drain(engine)
        return [last(made[str(seed)]) for seed in asked], toy.batches

    together, batches = sample([0, 1, 2])
    assert batches == [3] + [1] * (3 + 4 + 5)
    for seed, result in enumerate(together):
        assert torch.allclose(result, sample([seed])[0][0], atol=1e-6)


def test_outside_of_a_program_a_component_is_just_called() -> None:
    engine = make_engine(walk)
    seen = {}

    def run(ctx: Program) -> None:
        seen["toy"] = ctx.component("toy", Toy)

    engine = make_engine(run)
    engine.add("a", Message())
    drain(engine)
    assert seen["toy"](torch.ones(2, 4)).shape == (2, 4)


def test_messages_arrive_in_order_and_wake_the_program() -> None:
    def run(ctx: Program) -> None:
        total = 0
        while True:
            message = ctx.receive()
            total += message.start
            ctx.emit("audio", {}, {"total": total})
            if message.final:
                return

    engine = make_engine(run)
    engine.add("a", Message(start=1))
    assert [e.meta["total"] for e in engine.step()] == [1]
    assert not engine.has_work and engine.step() == []
    engine.receive("a", Message(start=2))
    engine.receive("a", Message(start=3, final=True))
    engine.receive("unknown", Message())
    emissions = engine.step()
    assert [(e.meta["total"], e.finished) for e in emissions] == [(3, False), (6, True)]
    assert len(engine) == 0


def test_errors_stay_with_their_request(caplog: pytest.LogCaptureFixture) -> None:
    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Toy)
        match ctx.options.get("fail"):
            case "client":
                raise OmniClientError("no", 413, "TooLarge")
            case "program":
                raise ZeroDivisionError("secret")
            case "model":
                toy(torch.full((1, 4), torch.inf))
            case "arguments":
                toy(nothing=1)
            case "caught":
                with pytest.raises(ArithmeticError):
                    toy(torch.full((1, 4), torch.nan))
        ctx.emit("audio", {"x": toy(torch.ones(1, 4))}, {})

    engine = make_engine(run)
    for fail in ("client", "program", "model", "arguments", "caught", "none", "none too"):
        engine.add(fail, Message({"fail": fail}))
    with caplog.at_level(logging.ERROR):
        made = drain(engine)
    errors = {name: emissions[-1].error for name, emissions in made.items()}
    assert {n for n, error in errors.items() if error is None} == {"caught", "none", "none too"}
    client = errors["client"]
    assert client is not None
    assert (client.message, client.status_code, client.error_type) == ("no", 413, "TooLarge")
    for name, kind in (
        ("program", "ZeroDivisionError"),
        ("model", "ArithmeticError"),
        ("arguments", "TypeError"),
    ):
        error = errors[name]
        assert error is not None
        assert (error.message, error.status_code) == (f"toy failed: {kind}", None)
    assert "secret" in caplog.text
    assert torch.equal(last(made["none"]), last(made["caught"]))
    assert len(engine) == 0


def test_a_result_that_cannot_be_split_runs_alone_from_then_on() -> None:
    class Mean(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Mean)
        x = torch.full((1, 4), float(ctx.seed))
        for _ in range(2):
            x = toy(x).reshape(1, 1)
        ctx.emit("audio", {"x": x}, {})

    engine = make_engine(run, Mean())
    for seed in range(3):
        engine.add(str(seed), Message({"seed": seed}))
    made = drain(engine)
    assert [float(last(made[str(seed)])) for seed in range(3)] == [0, 1, 2]
    assert engine.forward_sizes == {3: 1, 1: 6}


def test_too_many_requests_are_refused() -> None:
    engine = make_engine(lambda ctx: ctx.receive() and ctx.receive(), max_requests=2)
    for name in "abc":
        engine.add(name, Message())
    with pytest.raises(ValueError, match="already running"):
        engine.add("a", Message())
    (refused,) = engine.step()
    assert (refused.request_id, refused.finished) == ("c", True)
    assert refused.error is not None and "2 requests are running" in refused.error.message
    engine.abort(["a"])
    engine.add("d", Message())
    assert engine.step() == [] and len(engine) == 2


def test_random_numbers_do_not_depend_on_company() -> None:
    """Programs that draw from the global generator have one each."""

    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Toy)
        x = torch.randn(1, 4)
        for _ in range(ctx.options["steps"]):
            x = toy(x) + torch.randn(1, 4)
        ctx.emit("audio", {"x": x}, {})

    def make(*requests: tuple[int, int]) -> dict[str, list[Emission]]:
        engine = make_engine(run)
        for seed, steps in requests:
            engine.add(f"{seed}", Message({"seed": seed, "steps": steps}))
        return drain(engine)

    torch.manual_seed(1234)
    before = torch.get_rng_state()
    alone = {seed: last(make((seed, 3))[str(seed)]) for seed in (1, 2)}
    torch.manual_seed(99)
    together = make((0, 1), (1, 3), (2, 3))
    for seed, expected in alone.items():
        torch.testing.assert_close(last(together[str(seed)]), expected, atol=1e-6, rtol=0)
    assert not torch.equal(alone[1], alone[2])
    torch.set_rng_state(before)
    expected_draw = torch.randn(3)
    torch.set_rng_state(before)
    engine = make_engine(run)
    torch.set_rng_state(before)
    engine.add("r", Message({"seed": 5, "steps": 2}))
    drain(engine)
    assert torch.equal(torch.randn(3), expected_draw), "the process's own stream was touched"


def test_nothing_starves() -> None:
    """A lone call of a rare shape gets its turn among a stream of full batches."""
    order: list[str] = []

    class Shapes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append("rare" if x.shape[1] == 3 else "common")
            return x

    def run(ctx: Program) -> None:
        shapes = ctx.component("toy", Shapes)
        for _ in range(1 if ctx.options.get("rare") else 50):
            shapes(torch.zeros(1, 3 if ctx.options.get("rare") else 4))

    scheduler = CallScheduler(8, Policy(patience_s=0, overdue_every=2))
    engine = make_engine(run, Shapes(), scheduler=scheduler)
    for i in range(5):
        engine.add(str(i), Message())
    engine.add("rare", Message({"rare": True}))
    drain(engine)
    assert order.index("rare") <= 4


class Tracked:
    """Something whose life can be watched."""


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32))
def test_what_has_ended_keeps_nothing_alive(seed: int) -> None:
    """However a request ends, its locals are gone at once, without the garbage collector."""
    chance = random.Random(seed)
    watched: list[weakref.ref[Any]] = []

    def run(ctx: Program) -> None:
        tracked = Tracked()
        watched.append(weakref.ref(tracked))
        toy = ctx.component("toy", Toy)
        x = torch.randn(1, 4)
        try:
            for step in range(ctx.options["steps"]):
                x = toy(x, ctx.options["shift"])
                ctx.emit("audio", {"x": x}, {"step": step})
                if step == ctx.options["fail_at"]:
                    toy(torch.full((1, 4), torch.inf))
            ctx.receive()
            ctx.receive()
        finally:
            if ctx.options["clean_up"]:
                toy(x)
        del tracked

    engine = make_engine(run, max_batch=3)
    gc.disable()
    logging.disable()
    try:
        names = [str(i) for i in range(6)]
        for name in names:
            options = {
                "steps": chance.randint(0, 4),
                "fail_at": chance.choice([-1, -1, 0, 2]),
                "shift": chance.choice([0.0, 1.0]),
                "clean_up": chance.random() < 0.5,
            }
            engine.add(name, Message(options))
        for _ in range(chance.randint(0, 8)):
            engine.step()
            if chance.random() < 0.3:
                engine.abort([chance.choice(names)])
        engine.abort(names)
        engine.step()
        assert len(engine) == 0 and not engine.has_work
        assert [ref() for ref in watched] == [None] * len(watched)
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def test_an_aborted_request_emits_nothing_more() -> None:
    engine = make_engine(walk)
    for name in ("a", "b"):
        engine.add(name, Message({"steps": 4}))
    engine.step()
    engine.abort(["a", "a", "unknown"])
    assert set(drain(engine)) == {"b"}


class Watched(CallScheduler):
    """Keeps what the engine tells it."""

    def __init__(self) -> None:
        super().__init__(4)
        self.left: dict[str, list[float]] = {}
        self.timed = 0

    def add(self, call: Call) -> None:
        super().add(call)
        self.left.setdefault(call.program.request_id, []).append(call.calls_left)

    def ran(self, batch: Batch, seconds: float) -> None:
        super().ran(batch, seconds)
        assert seconds >= 0
        self.timed += batch.calls


def test_the_scheduler_knows_what_is_left() -> None:
    """What programs say, then what others did; anew after each message that was waited for."""

    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Toy)
        if ctx.options.get("says"):
            ctx.expect("toy", 4)
        for _ in range(2):
            ctx.receive()
            for _ in range(4):
                toy(torch.ones(1, 4))

    scheduler = Watched()
    engine = make_engine(run, scheduler=scheduler)
    engine.add("says", Message({"says": True}))
    drain(engine)
    engine.add("silent", Message())
    drain(engine)
    for name in ("says", "silent"):
        engine.receive(name, Message())
    drain(engine)
    assert scheduler.left == {"says": [4, 3, 2, 1, 4, 3, 2, 1], "silent": [4, 3, 2, 1] * 2}
    assert scheduler.timed >= 12, "all forwards but the last one have been timed"


def test_a_priority_is_the_requests_own() -> None:
    order: list[int] = []

    def run(ctx: Program) -> None:
        toy = ctx.component("toy", Toy)
        for _ in range(3):
            toy(torch.ones(1, 4))
            order.append(ctx.job.priority)

    engine = make_engine(run, max_batch=1)
    for priority in (5, -5, 0):
        engine.add(str(priority), Message(priority=priority))
    drain(engine)
    assert order == [-5] * 3 + [0] * 3 + [5] * 3
