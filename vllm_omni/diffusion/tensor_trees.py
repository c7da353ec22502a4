# SPDX-License-Identifier: Apache-2.0
"""Trees of mappings, lists and tuples with tensors in them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def iter_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of mappings, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from iter_tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from iter_tensors(entry)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same tree with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(entry, function) for key, entry in value.items()}
        return mapping_of(type(value), mapped)
    if isinstance(value, list | tuple):
        return sequence_of(type(value), [map_tensors(entry, function) for entry in value])
    return value


def mapping_of(cls: type, entries: dict[Any, Any]) -> Any:
    """A dict, or a model output class that takes its fields by name."""
    return entries if cls is dict else cls(**entries)


def sequence_of(cls: type, entries: Iterable[Any]) -> Any:
    """A list or tuple, or a named tuple."""
    return cls(entries) if cls in (list, tuple) else cls(*entries)


def filled(tree: Any, tensors: Iterable[torch.Tensor | None]) -> Any:
    """The same tree with its tensors replaced by others, in order."""
    others = iter(tensors)
    return map_tensors(tree, lambda _: next(others))
