# SPDX-License-Identifier: Apache-2.0
"""A batch cut into shares that run at the same time, each on devices of its own."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from vllm_omni.diffusion.rules import Along, Batching, Equal, Mask, Ragged, Rule
from vllm_omni.diffusion.tensor_trees import mapping_of, sequence_of


class UncutError(Exception):
    """Rows of an argument cannot be told apart."""


def evenly(count: int, parts: int) -> list[range]:
    """Consecutive ranges over `count` things, at most `parts` and none of them empty."""
    parts = min(parts, count)
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def cut(value: Any, rule: Rule | None, rows: int, part: range) -> Any:
    """Some rows of a call's argument.

    Args:
        value: The argument of a call of `rows` rows.
        rule: What is known about it.
        rows: Of the call.
        part: Which of them.

    Raises:
        UncutError: Its rows cannot be told apart.
    """
    if isinstance(rule, Equal) or value is None:
        return value
    if rule in (Batching.PACKED, Batching.INDEX):
        raise UncutError(rule)
    if isinstance(value, torch.Tensor):
        dim = _dimension(value, rule, rows)
        if dim is None:
            return value
        per_row = value.shape[dim] // rows
        return value.narrow(dim, part.start * per_row, len(part) * per_row)
    if rule in (Batching.LIST, Batching.ALIKE, Batching.PER_ROW):
        return value[part.start : part.stop]
    if isinstance(value, Mapping):
        entries = {key: cut(entry, rule, rows, part) for key, entry in value.items()}
        return mapping_of(type(value), entries)
    if isinstance(value, list | tuple):
        return sequence_of(type(value), [cut(entry, rule, rows, part) for entry in value])
    return value


def _dimension(tensor: torch.Tensor, rule: Rule | None, rows: int) -> int | None:
    """The dimension of a tensor's rows; None if it is the same for all."""
    if isinstance(rule, Along):
        return rule.dim
    if isinstance(rule, Ragged | Mask) or rule is Batching.CAT:
        return 0
    if rule is Batching.STACK:
        return None if tensor.shape in ((), (1,)) else 0
    return 0 if rule is None and tensor.ndim and tensor.shape[0] == rows else None


def joined(results: Sequence[Any], lists: bool) -> Any:
    """What one forward would have given instead of several with consecutive rows.

    Args:
        results: Of each.
        lists: A list holds an entry for each row.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(results))
    if isinstance(first, Mapping):
        entries = {key: joined([each[key] for each in results], lists) for key in first}
        return mapping_of(type(first), entries)
    if lists and isinstance(first, list):
        return [entry for each in results for entry in each]
    if isinstance(first, list | tuple):
        columns = [joined(column, lists) for column in zip(*results, strict=True)]
        return sequence_of(type(first), columns)
    return first
