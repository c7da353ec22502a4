# SPDX-License-Identifier: Apache-2.0
"""Whatever is put together gives each call what it gets alone."""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.collate import CollationError, Collator
from vllm_omni.diffusion.rules import (
    UNUSED,
    Along,
    Batching,
    CallRules,
    Equal,
    Mask,
    Packing,
    Ragged,
    RaggedOutput,
)
from vllm_omni.diffusion.scheduler import CallScheduler

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


class Everything(nn.Module):
    """Uses each kind of argument row by row; the result is a tree."""

    def forward(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        table: torch.Tensor,
        extra: dict[str, Any] | None = None,
        scale: float = 1.0,
    ) -> dict[str, Any]:
        rows = len(x)
        time = time.expand(rows).reshape(rows, *[1] * (x.ndim - 1))
        y = torch.tanh(x) * scale + time + table.sum()
        if extra is not None:
            y = y + extra["more"][0].reshape(rows, *[1] * (x.ndim - 1))
        return {
            "y": y,
            "pair": Pair(y.flatten(1).sum(1), [y * 2]),
            "output": BaseModelOutput(last_hidden_state=y),
            "nothing": None,
            "tuple": (3, "text"),
        }


EVERYTHING = CallRules({"time": Batching.STACK, "table": Batching.SHARED})


def collator(module: nn.Module, rules: CallRules) -> Collator:
    return Collator(module, inspect.signature(module.forward), rules, CPU)


def make_call(to: Collator, *args: Any, **kwargs: Any) -> Call:
    call = Call(None, to, args, kwargs)  # type: ignore[arg-type]
    to.describe(call)
    return call


def test_none_named_is_as_none_not_named() -> None:
    """LongCat-Image names `guidance=None` in one of the two calls of a step."""
    run = collator(Everything(), EVERYTHING)
    common = {"time": torch.tensor(1.0), "table": torch.ones(2)}
    calls = [
        make_call(run, torch.ones(1, 3), **common, extra=None),
        make_call(run, torch.zeros(1, 3), **common),
    ]
    other = make_call(run, torch.ones(1, 3), **common, extra={"more": [torch.ones(1)]})
    assert calls[0].group == calls[1].group != other.group
    for result, call in zip(run.run(calls), calls, strict=True):
        assert_same(result, run.run([call])[0])
    for result, call in zip(run.run(calls[::-1]), calls[::-1], strict=True):
        assert_same(result, run.run([call])[0])


def assert_same(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
    elif isinstance(expected, dict):
        assert list(result) == list(expected)
        for key in expected:
            assert_same(result[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(result) == len(expected)
        for part, expected_part in zip(result, expected, strict=True):
            assert_same(part, expected_part)
    else:
        assert result == expected


@st.composite
def everything_calls(draw: st.DrawFn) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of calls, of few enough kinds that some agree."""
    calls = []
    for seed in range(draw(st.integers(1, 6))):
        generator = torch.Generator().manual_seed(seed)
        rows = draw(st.integers(1, 3))
        shape = draw(st.sampled_from([(4,), (2, 3)]))
        dtype = draw(st.sampled_from([torch.float32, torch.float64]))
        kwargs: dict[str, Any] = {"table": torch.arange(draw(st.sampled_from([5, 7])))}
        if draw(st.booleans()):
            kwargs["extra"] = {"more": (torch.randn(rows, generator=generator, dtype=dtype),)}
        if draw(st.booleans()):
            kwargs["scale"] = draw(st.sampled_from([1.0, 2.0]))
        x = torch.randn(rows, *shape, generator=generator, dtype=dtype)
        time = torch.rand((), generator=generator, dtype=dtype)
        positional = draw(st.integers(1, 2))
        args = (x, time)[:positional]
        if positional == 1:
            kwargs["time"] = time
        calls.append((args, kwargs))
    return calls


@settings(deadline=None)
@given(everything_calls())
def test_groups_give_each_call_its_own_result(
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]],
) -> None:
    module = Everything()
    to = collator(module, EVERYTHING)
    groups: dict[Any, list[Call]] = {}
    for args, kwargs in arguments:
        call = make_call(to, *args, **kwargs)
        assert call.rows == len(args[0])
        groups.setdefault(call.group, []).append(call)
    for calls in groups.values():
        for call, result in zip(calls, to.run(calls), strict=True):
            assert_same(result, module(*call.args, **call.kwargs))


def test_what_must_differ_for_calls_to_run_apart() -> None:
    to = collator(Everything(), EVERYTHING)
    x, time, table = torch.zeros(2, 4), torch.tensor(0.5), torch.arange(3)
    base = make_call(to, x, time, table)
    same = [
        make_call(to, torch.ones(3, 4), torch.tensor(0.1), torch.arange(3)),
        make_call(to, torch.zeros(1, 4), torch.tensor(0.5), table),
    ]
    apart = [
        make_call(to, torch.zeros(2, 5), time, table),
        make_call(to, x.double(), time, table),
        make_call(to, x, time, table + 1),
        make_call(to, x, time, table.int()),
        make_call(to, x, time, table=table),
        make_call(to, x, time, table, None),
        make_call(to, x, time, table, scale=2.0),
        make_call(to, x, time, table, scale=2),
    ]
    assert all(call.group == base.group for call in same)
    assert len({base.group, *(call.group for call in apart)}) == len(apart) + 1


class Causal(nn.Module):
    """Running sums: no sample depends on a later one; three samples fewer than two a frame."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        sums = x.cumsum(-1)
        if mask is not None:
            sums = sums + mask.cumsum(-1)
        return sums.repeat_interleave(2, dim=-1)[..., :-3]


RAGGED = CallRules(
    {"x": Ragged(-1, fill=9.0), "mask": Ragged(1)}, RaggedOutput(lambda length: 2 * length - 3)
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(2, 9)), min_size=1, max_size=6),
    st.booleans(),
)
def test_ragged_calls_run_together(shapes: list[tuple[int, int]], with_mask: bool) -> None:
    module = Causal()
    to = collator(module, RAGGED)
    calls = []
    for seed, (rows, length) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, length, generator=generator)
        kwargs = {"mask": torch.randn(rows, length, generator=generator)} if with_mask else {}
        calls.append(make_call(to, x, **kwargs))
        assert (calls[-1].rows, calls[-1].length) == (rows, length)
    assert len({call.group for call in calls}) == 1
    for call, result in zip(calls, to.run(calls), strict=True):
        expected = module(*call.args, **call.kwargs)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_ragged_arguments_of_a_call_agree() -> None:
    to = collator(Causal(), RAGGED)
    with pytest.raises(ValueError, match="differ in length"):
        make_call(to, torch.zeros(1, 4), torch.zeros(1, 5))


class Joint(nn.Module):
    """Pictures with a prompt each: as many layers as you like, prompts masked, rows alike."""

    def forward(
        self,
        picture: torch.Tensor,
        prompt: torch.Tensor,
        layers: torch.Tensor,
        mask: torch.Tensor | None = None,
        shapes: list[tuple[int, int]] | None = None,
        patches: torch.Tensor | None = None,
        cache: Any = None,
        generator: Any = None,
    ) -> torch.Tensor:
        assert shapes is None or len(shapes) == len(picture)
        assert patches is None or len(patches) == 3 * len(picture)
        valid = torch.ones(prompt.shape[:2]) if mask is None else mask.float()
        said = (prompt * valid[..., None]).sum((1, 2)) / valid.sum(1)
        return picture + (said + layers.sum((0, 2)))[:, None]


JOINT = CallRules(
    {
        "prompt": Ragged(dim=1, fill=99.0),
        "mask": Mask(),
        "layers": Along(dim=1),
        "shapes": Batching.PER_ROW,
        "patches": Batching.PACKED,
        "cache": Equal(lambda cache: cache["mode"]),
        "generator": UNUSED,
    },
    beside=lambda arguments: arguments["picture"].shape[1],
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.booleans()), min_size=1, max_size=6)
)
def test_masks_cover_the_padding(asked: list[tuple[int, int, bool]]) -> None:
    module = Joint()
    to = collator(module, JOINT)
    calls = []
    for seed, (rows, length, masked) in enumerate(asked):
        generator = torch.Generator().manual_seed(seed)
        call = make_call(
            to,
            torch.randn(rows, 4, generator=generator),
            torch.randn(rows, length, 2, generator=generator),
            torch.randn(5, rows, 3, generator=generator),
            mask=(torch.arange(length) <= seed).expand(rows, -1) if masked else None,
            shapes=[(3, 4)] * rows,
            patches=torch.randn(3 * rows, 2, generator=generator),
            cache={"mode": None, "seed": seed},
            generator=generator,
        )
        assert (call.rows, call.length, call.beside) == (rows, length, 4)
        calls.append(call)
    assert len({call.group for call in calls}) == 1
    for call, result in zip(calls, to.run(calls), strict=True):
        torch.testing.assert_close(result, module(*call.args, **call.kwargs), atol=1e-5, rtol=0)


def test_what_a_rule_says_must_agree() -> None:
    to = collator(Joint(), JOINT)
    tensors = torch.zeros(2, 4), torch.zeros(2, 3, 2), torch.zeros(5, 2, 3)
    calls = [
        make_call(to, *tensors, shapes=[(3, 4)] * 2, cache={"mode": None}),
        make_call(to, *tensors, shapes=[(4, 3)] * 2, cache={"mode": None}),
        make_call(to, *tensors, shapes=[(3, 4), (4, 3)], cache={"mode": None}),
        make_call(to, *tensors, shapes=[(3, 4)] * 2, cache={"mode": "read"}),
        make_call(
            to, *tensors[:2], torch.zeros(4, 2, 3), shapes=[(3, 4)] * 2, cache={"mode": None}
        ),
    ]
    assert len({call.group for call in calls}) == len(calls)


def test_lists_of_like_entries() -> None:
    to = collator(Lists(), CallRules({"x": Batching.ALIKE}))
    first = make_call(to, [torch.zeros(2)] * 2, torch.tensor([1.0, 2.0]))
    second = make_call(to, [torch.zeros(2)], torch.tensor([3.0]))
    other = make_call(to, [torch.zeros(3)], torch.tensor([3.0]))
    assert first.group == second.group != other.group
    (one,), (two,) = to.run([first, second])
    assert [part.tolist() for part in (*one, *two)] == [[1, 1], [2, 2], [3, 3]]


class Guided(nn.Module):
    """Answers for the batch twice: once as given, once negated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, -x])


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_stacked_outputs(rows: list[int]) -> None:
    to = collator(Guided(), CallRules(stacked_outputs=True))
    calls = [make_call(to, torch.rand(n, 2)) for n in rows]
    for call, result in zip(calls, to.run(calls), strict=True):
        assert torch.equal(result, Guided()(call.args[0]))


class Lists(nn.Module):
    """Takes and gives one entry per row, each of its own shape."""

    def forward(self, x: list[torch.Tensor], t: torch.Tensor) -> tuple[list[torch.Tensor]]:
        assert len(x) == len(t)
        return ([entry + shift for entry, shift in zip(x, t, strict=True)],)


def test_lists_are_joined_and_split() -> None:
    to = collator(Lists(), CallRules({"x": Batching.LIST}))
    first = make_call(to, [torch.zeros(2), torch.zeros(3)], torch.tensor([1.0, 2.0]))
    second = make_call(to, [torch.zeros(5, 1)], torch.tensor([3.0]))
    assert first.group == second.group
    (one,), (two,) = to.run([first, second])
    assert [part.tolist() for part in one] == [[1, 1], [2, 2, 2]]
    assert [part.flatten().tolist() for part in two] == [[3] * 5]


@dataclass
class Opaque:
    value: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [lambda x: x.sum(), lambda x: x[:1], lambda x: torch.cat([x, x]), lambda x: Opaque(x)],
    ids=["scalar", "too few rows", "too many rows", "unknown type"],
)
def test_results_that_cannot_be_split(make: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x)

    to = collator(Model(), CallRules())
    calls = [make_call(to, torch.zeros(2, 3)) for _ in range(2)]
    with pytest.raises(CollationError):
        to.run(calls)
    to.run(calls[:1])


@dataclass
class Distribution:
    """An output that is no tree of tensors."""

    mean: torch.Tensor
    spread: float


class Encoder(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"made": Distribution(x * 2, 1.0), "cache": object()}


PACKED = Packing(
    unpack=lambda made: (made.mean, made.spread), pack=lambda parts: Distribution(*parts)
)


def test_objects_are_split_as_the_rules_say_and_unused_outputs_are_left_out() -> None:
    rules = CallRules(packings={Distribution: PACKED}, dropped_outputs=frozenset({"cache"}))
    to = collator(Encoder(), rules)
    inputs = [torch.randn(2, 3), torch.randn(1, 3)]
    results = to.run([make_call(to, x) for x in inputs])
    for x, result in zip(inputs, results, strict=True):
        assert list(result) == ["made"]
        torch.testing.assert_close(result["made"].mean, x * 2)
        assert result["made"].spread == 1.0
    (alone,) = to.run([make_call(to, inputs[0])])
    assert list(alone) == ["made", "cache"]


class Halves(nn.Module):
    """A timestep for all rows, and tokens of two pictures for each row."""

    def forward(
        self, hidden: torch.Tensor, time: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        pairs = tokens.reshape(-1, 2, tokens.shape[-1]).sum(1)
        return hidden + time.expand(len(hidden))[:, None] + pairs


class Counting(nn.Module):
    """Adds to each row the sum of what belongs to it."""

    def forward(self, x: torch.Tensor, more: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, owner, more)


def test_row_numbers_are_counted_on_from_call_to_call() -> None:
    to = collator(Counting(), CallRules({"owner": Batching.INDEX}))
    owners = [torch.tensor([1, 0]), torch.tensor([0, 0]), torch.tensor([1, 1])]
    calls = [make_call(to, torch.zeros(2, 3), torch.randn(2, 3), owner) for owner in owners]
    assert len({call.signature for call in calls}) == 1
    for call, result in zip(calls, to.run(calls), strict=True):
        torch.testing.assert_close(result, to.function(*call.args))


def test_one_number_for_all_rows_and_several_rows_for_one() -> None:
    rules = {"hidden": Batching.CAT, "time": Batching.STACK, "tokens": Batching.CAT}
    to = collator(Halves(), CallRules(rules))
    calls = [
        make_call(to, hidden=torch.randn(2, 4), time=time, tokens=torch.randn(4, 4))
        for time in (torch.tensor([0.1]), torch.tensor(0.7))
    ]
    assert calls[0].rows == 2
    assert calls[0].signature == calls[1].signature
    for call, result in zip(calls, to.run(calls), strict=True):
        torch.testing.assert_close(result, to.function(**call.kwargs))
    short = make_call(
        to, hidden=torch.randn(2, 4), time=torch.tensor(0.7), tokens=torch.randn(2, 4)
    )
    assert short.signature != calls[0].signature


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 200)), max_size=12), st.integers(1, 5))
def test_scheduler_bounds_batches_and_padding(
    shapes: list[tuple[int, int]], max_batch: int
) -> None:
    to = collator(Causal(), RAGGED)
    scheduler = CallScheduler(max_batch)
    calls = [make_call(to, torch.zeros(rows, length)) for rows, length in shapes]
    for call in calls:
        scheduler.add(call)
    seen: list[Call] = []
    while chosen := scheduler.select():
        assert len(chosen) <= max_batch
        rows = sum(call.rows for call in chosen)
        padded = max(call.length for call in chosen) * rows
        assert sum(call.rows * call.length for call in chosen) >= 0.75 * padded
        seen += chosen
    assert len(seen) == len(calls) and set(seen) == set(calls)
    assert len(scheduler) == 0


def test_scheduler_limits_of_a_component() -> None:
    to = collator(Causal(), CallRules(max_batch=2))
    scheduler = CallScheduler(8)
    for _ in range(5):
        scheduler.add(make_call(to, torch.zeros(1, 4)))
    assert [len(scheduler.select()) for _ in range(3)] == [2, 2, 1]
