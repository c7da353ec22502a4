# SPDX-License-Identifier: Apache-2.0
"""Second calls of guided steps that run before they are made (issue 4: CFG halves together)."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.conftest import CHECKPOINTS
from tests.diffusion.parity import Ask, Unmeasured, counted, load, served, stock
from vllm_omni.diffusion.collate import CollationError
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.foresight import TRIES
from vllm_omni.diffusion.program import Message, Program
from vllm_omni.diffusion.rules import Batching, CallRules, Mask, Ragged
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded, ProgramSpec
from vllm_omni.testing.diffusers_tiny import build, recipe

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


class Denoiser(nn.Module):
    """Sums and products element by element: the same bits in whatever batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))
        self.rows: list[int] = []

    def forward(
        self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, extra: Mapping[str, Any]
    ) -> tuple[torch.Tensor]:
        self.rows.append(len(x))
        state = extra.get("state")
        drawn = 0.0 if state is None else torch.rand(1, generator=state)
        return (x * 0.5 + text * 0.25 + time[:, None] + self.shift + drawn,)

    @contextmanager
    def varied(self, variant: Any) -> Iterator[None]:
        """Its variants have other weights."""
        self.shift.fill_(variant or 0.0)
        yield


class Refusing(Denoiser):
    """Raises for more than one row."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        if len(x) > 1:
            raise self.error
        return super().forward(x, *args, **kwargs)


class Codec(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@dataclass(frozen=True)
class Step:
    """What a program does in one step, beside the first call.

    Attributes:
        guided: It makes the second call.
        write: What it changes in place between the two calls.
        fresh: What it makes anew, with equal values, for the second call.
        text: Added to the negative prompt from now on; a new tensor if not 0.
        decode: When it calls another component: before, between or after the two.
        variant: Of the component, for the second call; 0 is as it is.
        autocast: The second call is under autocast.
        state: A generator that the model draws from is among the arguments.
    """

    guided: bool = True
    write: str = ""
    fresh: bool = False
    text: float = 0.0
    decode: str = ""
    variant: float = 0.0
    autocast: bool = False
    state: bool = False


def run(ctx: Program) -> None:
    """A pipeline with classifier-free guidance, and whatever may go wrong with it."""
    denoiser, codec = ctx.component("denoiser", Denoiser), ctx.component("codec", Codec)
    generator = torch.Generator().manual_seed(ctx.seed)
    x = torch.randn(1, 4, generator=ctx.generator)
    text, negative = torch.randn(2, 1, 4, generator=ctx.generator).unbind()
    steps: Sequence[Step] = ctx.options["steps"]
    for number, step in enumerate(steps):
        negative = negative + step.text if step.text else negative
        time = torch.full((1,), float(number))
        extra = {"scale": 1.0, "state": generator if step.state else None}
        if step.decode == "before":
            codec(x)
        (found,) = denoiser(x, time / 10, text=text, extra=extra)
        if step.guided:
            if step.write:
                {"x": x, "time": time, "negative": negative}[step.write].add_(0.5)
            if step.decode == "between":
                x = codec(x)
            ctx.vary("denoiser", step.variant or None)
            given = x.clone() if step.fresh else x
            with torch.autocast("cpu", torch.bfloat16, enabled=step.autocast):
                (without,) = denoiser(given, time / 10, text=negative, extra=extra)
            ctx.vary("denoiser", None)
            found.sub_(without).mul_(3).add_(without)
        if step.decode == "after":
            codec(x)
        x = x - found / 8
    ctx.emit("image", {"x": x}, {"made": ctx.made("denoiser")})


def never(ctx: LoadContext) -> Loaded:
    return Loaded({})


RULES = CallRules({"x": Batching.CAT})


def make_engine(
    foresee: bool, denoiser: Denoiser | None = None, max_batch: int = 8, rules: CallRules = RULES
) -> tuple[Engine, Denoiser]:
    model = denoiser or Denoiser()
    parts = {
        "denoiser": Component(model, {"forward": rules}, model.varied),
        "codec": Component(Codec()),
    }
    scheduler = CallScheduler(max_batch, cost=Unmeasured())
    spec = ProgramSpec("guided", run, never)
    return Engine(spec, Loaded(parts), scheduler=scheduler, foresee=foresee), model


def outcome(engine: Engine, requests: Sequence[Sequence[Step]]) -> list[tuple[torch.Tensor, int]]:
    """What each request makes, and how many calls it is said to have made."""
    for number, steps in enumerate(requests):
        engine.add(str(number), Message({"seed": number, "steps": steps}))
    made = {}
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None and emission.tensors is not None, emission.error
            made[emission.request_id] = emission.tensors["x"], emission.meta["made"]
    return [made[str(number)] for number in range(len(requests))]


def calls(requests: Sequence[Sequence[Step]]) -> int:
    return sum(1 + step.guided for steps in requests for step in steps)


def check(requests: Sequence[Sequence[Step]], **options: Any) -> tuple[Engine, int]:
    """Foreseen or not, the results are the same; returns how many rows ran in vain."""
    plain, _ = make_engine(False, **options)
    engine, model = make_engine(True, **options)
    for one, other in zip(outcome(engine, requests), outcome(plain, requests), strict=True):
        assert torch.equal(one[0], other[0]) and one[1] == other[1]
    return engine, sum(model.rows) - calls(requests)


PLAIN, FRESH = Step(), Step(fresh=True)


@pytest.mark.parametrize("step", [PLAIN, FRESH, Step(decode="after"), Step(decode="before")])
def test_from_the_second_step_on_both_halves_run_together(step: Step) -> None:
    engine, in_vain = check([[step] * 6])
    decoded = 6 if step.decode else 0
    assert engine.forward_sizes == {1: 2 + decoded, 2: 5} and in_vain == 0


def test_guidance_that_starts_later_is_foreseen_as_well() -> None:
    """Three calls tell the habit, whatever came before."""
    engine, in_vain = check([[Step(guided=False), *[PLAIN] * 5]])
    assert engine.forward_sizes == {1: 3, 2: 4} and in_vain == 0


@pytest.mark.parametrize(
    "odd",
    [
        Step(guided=False),
        Step(write="x"),
        Step(write="time"),
        Step(write="negative"),
        Step(text=1.0),
        Step(decode="between"),
        Step(variant=2.0),
        Step(autocast=True),
        Step(state=True),
    ],
)
def test_a_wrong_guess_costs_one_row_and_no_result(odd: Step) -> None:
    engine, in_vain = check([[PLAIN] * 3 + [odd] * 2 + [PLAIN] * 3])
    assert in_vain <= 1
    assert engine.forward_sizes[2] >= 2  # there were right ones before


def test_what_can_change_in_a_call_is_not_guessed_at() -> None:
    engine, in_vain = check([[Step(state=True)] * 4])
    assert set(engine.forward_sizes) == {1} and in_vain == 0


def test_without_guidance_nothing_is_foreseen() -> None:
    engine, in_vain = check([[Step(guided=False)] * 2 * TRIES])
    assert set(engine.forward_sizes) == {1} and in_vain == 0


STEPS = st.builds(
    Step,
    guided=st.sampled_from([True, True, True, False]),
    write=st.sampled_from(["", "", "", "", "x", "time", "negative"]),
    fresh=st.booleans(),
    text=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    decode=st.sampled_from(["", "", "", "before", "between", "after"]),
    variant=st.sampled_from([0.0, 0.0, 0.0, 2.0]),
    autocast=st.sampled_from([False, False, False, True]),
    state=st.sampled_from([False, False, False, False, True]),
)
HABITS = st.lists(st.tuples(STEPS, st.integers(1, 4)), min_size=1, max_size=4).map(
    lambda runs: [step for step, times in runs for _ in range(times)]
)


@settings(deadline=None, max_examples=40)
@given(st.lists(HABITS, min_size=1, max_size=4), st.integers(1, 8))
def test_foreseen_equals_not_foreseen(requests: list[list[Step]], max_batch: int) -> None:
    """Whatever programs do, their results are the same bits; one row each at most is in vain."""
    _, in_vain = check(requests, max_batch=max_batch)
    assert 0 <= in_vain <= len(requests)


def test_nothing_is_foreseen_where_calls_that_were_made_fill_the_batch() -> None:
    engine, in_vain = check([[PLAIN] * 5] * 3, max_batch=3)
    assert engine.forward_sizes == {3: 10} and in_vain == 0


def test_what_is_left_of_a_batch_is_filled() -> None:
    requests = [[PLAIN] * 5] * 3
    engine, in_vain = check(requests, max_batch=4)
    assert in_vain == 0 and max(engine.forward_sizes) == 4
    assert sum(engine.forward_sizes.values()) < 10


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        CollationError("not divisible"),
        ArithmeticError("too many"),
    ],
)
def test_a_guess_that_fails_concerns_nobody(error: Exception) -> None:
    engine, _ = make_engine(True, Refusing(error))
    plain, _ = make_engine(False)
    (one,), (other,) = outcome(engine, [[PLAIN] * 5]), outcome(plain, [[PLAIN] * 5])
    assert torch.equal(one[0], other[0])
    assert engine.forward_sizes == {1: 10, 2: 1}


@torch.inference_mode()
def test_an_abort_leaves_nothing_of_a_guess() -> None:
    """Between the two calls, a kept result is all that is there of the second one."""

    def live_tensors() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}

    engine, model = make_engine(True)
    before = live_tensors()
    odd = [PLAIN] * 3 + [Step(decode="between")] + [PLAIN] * 3
    for steps in range(1, 2 * len(odd)):
        engine.add("r", Message({"seed": 1, "steps": odd}))
        for _ in range(steps):
            engine.step()
        engine.abort(["r"])
        assert len(engine) == 0 and not engine.has_work
    assert max(model.rows) == 2
    assert live_tensors() <= before


def test_prompts_of_other_lengths_run_together_with_the_models_mask() -> None:
    class Masked(Denoiser):
        def forward(
            self, x: torch.Tensor, text: torch.Tensor, mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.rows.append(len(x))
            seen = text if mask is None else text * mask[..., None]
            return x * 0.5 + seen.sum(1)

    def guided(ctx: Program) -> None:
        model = ctx.component("denoiser", Masked)
        x = torch.zeros(1, 2)
        text, negative = torch.ones(1, 4, 2), torch.full((1, 3, 2), 0.5)
        for _ in range(4):
            x = x + model(x, text) - model(x, negative)
        ctx.emit("image", {"x": x}, {"made": 8})

    rules = CallRules({"x": Batching.CAT, "text": Ragged(1), "mask": Mask()})
    made = []
    for foresee in (False, True):
        loaded = Loaded({"denoiser": Component(Masked(), {"forward": rules})})
        scheduler = CallScheduler(8, cost=Unmeasured())
        spec = ProgramSpec("guided", guided, never)
        engine = Engine(spec, loaded, scheduler=scheduler, foresee=foresee)
        made += outcome(engine, [[]])
    assert torch.equal(made[0][0], made[1][0])
    assert engine.forward_sizes == {1: 2, 2: 3}


@pytest.mark.parametrize(
    ("family", "alone"), [("wan21_t2v", 1), ("wan22_t2v", 2), ("qwen_image", 1)]
)
def test_forwards_of_a_real_pipeline_halve(family: str, alone: int) -> None:
    """One request: two forwards in the first step of each transformer, one in all others."""
    example = recipe(family).examples[0]
    loaded = load(build(family, CHECKPOINTS / "diffusers" / family), example.pipeline)
    ask = Ask("a red square on a white ground", steps=6, seed=1)
    with counted(loaded) as forwards:
        (made,) = served(loaded, example, [ask])
    assert len(forwards) == ask.steps + alone
    torch.testing.assert_close(made, stock(loaded, example, ask), atol=1e-4, rtol=0)
    with counted(loaded) as forwards:
        served(loaded, example, [replace(ask, guidance=1.0)])
    assert len(forwards) == ask.steps
