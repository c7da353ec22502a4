# SPDX-License-Identifier: Apache-2.0
"""Where forwards can run apart, calls and rows of a batch do, and nothing of it shows."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.collate import Collator
from vllm_omni.diffusion.rules import Along, Batching, CallRules, Mask, Ragged
from vllm_omni.diffusion.spread import Arguments
from vllm_omni.diffusion.switch import Autocast

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

CPU = torch.device("cpu")
RULES = CallRules(
    {
        "time": Batching.STACK,
        "text": Ragged(dim=1),
        "mask": Mask(),
        "across": Along(dim=1),
        "names": Batching.PER_ROW,
        "pictures": Batching.LIST,
        "patches": Batching.PACKED,
    }
)


class Side:
    """Runs shares one after the other, and keeps them."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.shares: list[Arguments] = []

    def run(
        self, forward: Callable[..., Any], autocast: Autocast, shares: Sequence[Arguments]
    ) -> list[Any]:
        """See `Spread`."""
        assert 1 <= len(shares) <= self.width
        self.shares += shares
        return [forward(*share.args, **share.kwargs) for share in shares]


class Model(nn.Module):
    """Of each row, the sum of all that it is given."""

    def forward(
        self,
        hidden: torch.Tensor,
        time: torch.Tensor,
        text: torch.Tensor,
        mask: torch.Tensor | None = None,
        across: torch.Tensor | None = None,
        names: list[str] | None = None,
        pictures: list[torch.Tensor] | None = None,
        patches: torch.Tensor | None = None,
        nested: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """[rows, width], a number or [rows], [rows, tokens] -> [rows] in a tree"""
        made = hidden.sum(1) + time + (text if mask is None else text * mask).sum(1)
        if across is not None:
            made = made + across.sum(0)
        if names is not None:
            assert len(names) == len(made)
        if nested is not None:
            made = made + nested["rows"][0].sum(1) * nested["table"].sum()
        if patches is not None:
            made = made + patches.sum()
        output = BaseModelOutput(last_hidden_state=made)
        return {"tuple": (made, 3), "output": output, "list": pictures, "nothing": None}


def collator(side: Side | None) -> Collator:
    model = Model()
    return Collator(model, inspect.signature(model.forward), RULES, CPU, spread=side)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + sum(shape)


def call(of: Collator, rows: int, tokens: int, **more: Any) -> Call:
    kwargs = {"time": torch.tensor(0.5), "text": numbers(rows, tokens), **more}
    made = Call(None, of, (numbers(rows, 3),), kwargs)  # type: ignore[arg-type]
    of.describe(made)
    return made


def everything(rows: int) -> dict[str, Any]:
    """Arguments of each kind whose rows can be told apart."""
    return {
        "mask": numbers(rows, 4) % 2 == 0,
        "across": numbers(2, rows),
        "names": ["same"] * rows,
        "pictures": [numbers(1 + row) for row in range(rows)],
        "nested": {"rows": (numbers(rows, 2),), "table": numbers(7)},
    }


@pytest.mark.parametrize(("rows", "width", "shares"), [(2, 2, [1, 1]), (5, 2, [2, 3]), (1, 3, [1])])
def test_a_lone_call_runs_in_its_rows(rows: int, width: int, shares: list[int]) -> None:
    side = Side(width)
    spread, plain = collator(side), collator(None)
    (made,) = spread.run([call(spread, rows, 4, **everything(rows))])
    (wanted,) = plain.run([call(plain, rows, 4, **everything(rows))])
    torch.testing.assert_close(made, wanted, atol=0, rtol=0)
    assert isinstance(made["output"], BaseModelOutput)
    assert [len(share.args[0]) for share in side.shares] == shares


def test_rows_that_cannot_be_told_apart_stay_together() -> None:
    side = Side(2)
    spread, plain = collator(side), collator(None)
    (made,) = spread.run([call(spread, 2, 4, patches=numbers(6))])
    (wanted,) = plain.run([call(plain, 2, 4, patches=numbers(6))])
    torch.testing.assert_close(made, wanted, atol=0, rtol=0)
    assert len(side.shares) == 1


@pytest.mark.parametrize(
    ("count", "width", "shares"), [(2, 2, [1, 1]), (5, 2, [2, 3]), (2, 4, [1, 1])]
)
def test_calls_run_apart(count: int, width: int, shares: list[int]) -> None:
    side = Side(width)
    spread, plain = collator(side), collator(None)
    lengths = [3, 6, 3, 4, 2][:count]
    made = spread.run([call(spread, 1, length) for length in lengths])
    wanted = [plain.run([call(plain, 1, length)])[0] for length in lengths]
    torch.testing.assert_close(made, wanted, atol=0, rtol=0)
    assert [len(share.args[0]) for share in side.shares] == shares


def test_a_call_that_runs_apart_is_not_padded() -> None:
    """So that attention needs no mask for the halves of guidance."""
    side = Side(2)
    spread = collator(side)
    spread.run([call(spread, 1, 3), call(spread, 1, 6)])
    assert [share.kwargs["text"].shape[1] for share in side.shares] == [3, 6]
    assert [share.kwargs.get("mask") for share in side.shares] == [None, None]
