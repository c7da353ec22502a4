# SPDX-License-Identifier: Apache-2.0
"""Putting calls of one method together into one forward, and taking its result apart.

A call's signature is the tree of what must agree for that: shapes, dtypes, devices, and values of
everything that is not batched. Calls with equal signatures run together; a call that agrees with
no other runs alone, untouched.
"""

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.replay import Replay
from vllm_omni.diffusion.rules import Along, Batching, CallRules, Equal, Mask, Ragged, Rule
from vllm_omni.diffusion.shares import UncutError, cut, evenly, joined
from vllm_omni.diffusion.spread import Arguments, Spread
from vllm_omni.diffusion.switch import under
from vllm_omni.diffusion.tensor_trees import (
    iter_tensors,
    map_tensors,
    mapping_of,
    sequence_of,
)


class CollationError(Exception):
    """The result of a batched forward cannot be taken apart."""


class Collator:
    """Runs one method of one component for any number of calls at once.

    Args:
        function: The component's bound method (the component itself for `forward`).
        parameters: The method's signature, for the names of positional arguments.
        rules: What is known about the method.
        device: Where the component is. Arguments are moved there, results back to where the
            call's batched arguments were.
        within: See `Component`.
        method: The function's name, by which other modules have it.
        spread: Runs it on several devices; None for this one alone.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: inspect.Signature,
        rules: CallRules,
        device: torch.device,
        within: Callable[[Hashable], AbstractContextManager[nn.Module | None]] | None = None,
        method: str = "forward",
        spread: Spread | None = None,
    ) -> None:
        self.function = function
        self._within = within
        self._method = method
        self.rules = rules
        self.max_batch = rules.max_batch
        """Calls per forward; set to 1 when the method proves not to be batchable."""
        self._device = device
        self._lists = any(rule in _LISTS for rule in rules.arguments.values())
        self._positional = [
            name
            for name, parameter in parameters.parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        self._none_by_default = frozenset(
            name for name, each in parameters.parameters.items() if each.default is None
        )
        self._digests: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._replay: Replay | None = None
        self._spread = spread

    def capture(self, lengths: Sequence[int]) -> None:
        """Capture the method's CUDA graphs for some lengths, if it has any."""
        if self.rules.graphs is not None and self._device.type == "cuda":
            self._replay = Replay(self.function, self._method, self.rules, self._device, lengths)

    def describe(self, call: Call) -> None:
        """Fill in the call's `signature`, `rows`, `length` and `beside`."""
        arguments = self._arguments(call)
        call.rows = self._rows(arguments)
        lengths: set[int] = set()
        parts: list[Hashable] = [len(call.args)]
        for name, value, rule in arguments:
            parts.append(name)
            self._sign(value, rule, call.rows, parts, lengths)
        if len(lengths) > 1:
            raise ValueError(f"ragged arguments of one call differ in length: {sorted(lengths)}")
        if lengths:
            call.length = lengths.pop()
            if self.rules.beside is not None:
                call.beside = self.rules.beside({name: value for name, value, _ in arguments})
        call.signature = tuple(parts)

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """The calls' results, in order.

        Raises:
            CollationError: The calls cannot run together after all.
            Exception: Whatever the forward raises.
        """
        if self._spread is not None:
            return self._run_spread(self._spread, calls)
        given = self._given(calls)
        return self._taken(self._forward(calls[0], given.args, given.kwargs), calls)

    def _run_spread(self, spread: Spread, calls: Sequence[Call]) -> list[Any]:
        """Calls in shares that run at the same time; a single one in some of its rows each."""
        alone = len(calls) == 1
        parts = self._rows_apart(calls[0], spread.width) if alone else calls
        shares = [[parts[i] for i in part] for part in evenly(len(parts), spread.width)]
        given = [self._given(share) for share in shares]
        made = spread.run(self.function, calls[0].autocast, given)
        results = [
            result
            for share, whole in zip(shares, made, strict=True)
            for result in self._taken(whole, share)
        ]
        return [joined(results, self._lists)] if alone else results

    def _rows_apart(self, call: Call, parts: int) -> Sequence[Call]:
        """Calls of consecutive rows of a call, or itself if they cannot be told apart."""
        if parts == 1 or call.rows == 1:
            return [call]
        rules = self.rules.arguments
        names = (self._positional[i] if i < len(self._positional) else "" for i in count())
        rules_of_args = [rules.get(name) for name, _ in zip(names, call.args, strict=False)]
        apart = []
        try:
            for part in evenly(call.rows, parts):
                some = partial(cut, rows=call.rows, part=part)
                args = [some(v, rule) for v, rule in zip(call.args, rules_of_args, strict=True)]
                kwargs = {name: some(v, rules.get(name)) for name, v in call.kwargs.items()}
                piece = replace(call, args=tuple(args), kwargs=kwargs)
                self.describe(piece)
                apart.append(piece)
        except UncutError:
            return [call]
        return apart

    def _given(self, calls: Sequence[Call]) -> Arguments:
        """What one forward of all calls is given."""
        first = calls[0]
        args, kwargs = (first.args, first.kwargs) if len(calls) == 1 else self._collate(calls)
        if self._home(first) != self._device:
            to_device = partial(_move, device=self._device)
            args = tuple(map_tensors(value, to_device) for value in args)
            kwargs = {name: map_tensors(value, to_device) for name, value in kwargs.items()}
        return Arguments(args, kwargs)

    def _taken(self, result: Any, calls: Sequence[Call]) -> list[Any]:
        """Each call's part of what one forward gave, where the call was."""
        home = torch.device("cpu") if self.rules.to_host else self._home(calls[0])
        if home != self._device:
            result = map_tensors(result, partial(_move, device=home))
        return [result] if len(calls) == 1 else self._split(result, calls)

    def _forward(self, first: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            stack.enter_context(under(first.autocast))
            function = self.function
            if self._replay is not None and not first.autocast and first.variant is None:
                return self._replay(*args, **kwargs)
            if self._within is not None:
                other = stack.enter_context(self._within(first.variant))
                function = function if other is None else function_of(other, self._method)
            return function(*args, **kwargs)

    def _arguments(self, call: Call) -> list[tuple[str, Any, Rule | None]]:
        """(name, value, rule) of every argument: positional ones first, then by name.

        What is None, as it would be if it were not named, and has no rule, is left out.
        """
        rules = self.rules.arguments
        named = []
        for index, value in enumerate(call.args):
            name = self._positional[index] if index < len(self._positional) else f"*{index}"
            named.append((name, value, rules.get(name)))
        for name in sorted(call.kwargs):
            value, rule = call.kwargs[name], rules.get(name)
            if value is not None or rule is not None or name not in self._none_by_default:
                named.append((name, value, rule))
        return named

    def _home(self, call: Call) -> torch.device:
        for _, value, _ in self._arguments(call):
            for tensor in iter_tensors(value):
                if tensor.ndim:
                    return tensor.device
        return self._device

    @staticmethod
    def _rows(arguments: Sequence[tuple[str, Any, Rule | None]]) -> int:
        default = None
        for _, value, rule in arguments:
            if rule in _LISTS or rule is Batching.PER_ROW:
                return len(value)
            if rule in _ROWLESS or isinstance(rule, Mask | Equal):
                continue
            for tensor in iter_tensors(value):
                if isinstance(rule, Along):
                    return tensor.shape[rule.dim]
                if tensor.ndim and rule is not None:
                    return tensor.shape[0]
                if tensor.ndim and default is None:
                    default = tensor.shape[0]
        return 1 if default is None else default

    def _sign(
        self,
        value: Any,
        rule: Rule | None,
        rows: int,
        parts: list[Hashable],
        lengths: set[int],
    ) -> None:
        """Append to `parts` what must agree about `value`."""
        if isinstance(rule, Equal):
            parts += [rule, rule.by(value)]
        elif isinstance(rule, Mask):
            if value is not None:
                lengths.add(value.shape[-1])
        elif isinstance(value, torch.Tensor):
            kind = resolve(value, rule, rows)
            parts += [kind, value.dtype, value.device]
            if kind in (Batching.CAT, Batching.INDEX):
                parts += [value.shape[0] / rows, value.shape[1:]]
            elif kind is Batching.SHARED:
                parts += [value.shape, self._digest(value, cached=rule is Batching.SHARED)]
            elif kind is Batching.PACKED:
                parts.append(value.shape[1:])
            elif isinstance(kind, Along):
                parts += [value.shape[: kind.dim], value.shape[kind.dim + 1 :]]
            elif isinstance(kind, Ragged):
                dim = kind.dim % value.ndim
                lengths.add(value.shape[dim])
                parts.append((value.shape[1:dim], value.shape[dim + 1 :]))
        elif rule is Batching.LIST:
            parts += [rule, frozenset((entry.dtype, entry.device) for entry in value)]
        elif rule is Batching.ALIKE:
            kinds = frozenset((entry.dtype, entry.device, entry.shape) for entry in value)
            parts += [rule, kinds]
        elif rule is Batching.PER_ROW:
            parts.append(rule)
            alike = all(entry == value[0] for entry in value)
            self._sign(value[0] if alike else object(), None, rows, parts, lengths)
        elif isinstance(value, Mapping):
            parts += [type(value), len(value)]
            for key in value:
                parts.append(key)
                self._sign(value[key], rule, rows, parts, lengths)
        elif isinstance(value, list | tuple):
            parts += [type(value), len(value)]
            for entry in value:
                self._sign(entry, rule, rows, parts, lengths)
        else:
            parts += [type(value), value if isinstance(value, BY_VALUE) else id(value)]

    def _digest(self, tensor: torch.Tensor, cached: bool) -> bytes:
        if cached and tensor in self._digests:
            return self._digests[tensor]
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.blake2b(flat.numpy(), digest_size=16).digest()
        if cached:
            self._digests[tensor] = digest
        return digest

    def _collate(self, calls: Sequence[Call]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = calls[0]
        merged = {
            name: _merge([value, *others], rule, calls)
            for (name, value, rule), others in zip(
                self._arguments(first),
                zip(*([v for _, v, _ in self._arguments(call)] for call in calls[1:]), strict=True),
                strict=True,
            )
        }
        values = list(merged.values())
        return tuple(values[: len(first.args)]), {n: merged[n] for n in first.kwargs if n in merged}

    def _split(self, result: Any, calls: Sequence[Call]) -> list[Any]:
        """One result per call."""
        if isinstance(result, torch.Tensor):
            return self._split_tensor(result, calls)
        if isinstance(result, Mapping):
            columns = {
                key: self._split(value, calls)
                for key, value in result.items()
                if key not in self.rules.dropped_outputs
            }
            return [
                mapping_of(type(result), {key: column[i] for key, column in columns.items()})
                for i in range(len(calls))
            ]
        if self._lists and isinstance(result, list):
            ends = list(accumulate(call.rows for call in calls))
            if len(result) != ends[-1]:
                raise CollationError(f"a list of {len(result)} results for {ends[-1]} rows")
            return [result[end - call.rows : end] for end, call in zip(ends, calls, strict=True)]
        if isinstance(result, list | tuple):
            columns = [self._split(value, calls) for value in result]
            return [sequence_of(type(result), [c[i] for c in columns]) for i in range(len(calls))]
        if result is None or isinstance(result, BY_VALUE):
            return [result] * len(calls)
        if (packing := self.rules.packings.get(type(result))) is not None:
            return [packing.pack(piece) for piece in self._split(packing.unpack(result), calls)]
        raise CollationError(f"a result of type {type(result).__name__} cannot be taken apart")

    def _split_tensor(self, result: torch.Tensor, calls: Sequence[Call]) -> list[torch.Tensor]:
        total = sum(call.rows for call in calls)
        copies = result.shape[0] // total if result.ndim else 0
        if copies < 1 or copies * total != result.shape[0]:
            raise CollationError(f"a result of shape {tuple(result.shape)} for {total} rows")
        if copies > 1 and not self.rules.stacked_outputs:
            raise CollationError(f"a result of {copies} times the batch size {total}")
        if copies == 1:
            pieces = list(result.split([call.rows for call in calls]))
        else:
            parts = result.unflatten(0, (copies, total)).split([c.rows for c in calls], dim=1)
            pieces = [part.flatten(0, 1) for part in parts]
        if (ragged := self.rules.ragged_output) is not None:
            for i, call in enumerate(calls):
                pieces[i] = pieces[i].narrow(ragged.dim, 0, ragged.length(call.length))
        return pieces


_LISTS = (Batching.LIST, Batching.ALIKE)
_ROWLESS = (Batching.SHARED, Batching.STACK, Batching.PACKED, Batching.INDEX)
BY_VALUE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Enum)


def function_of(module: nn.Module, method: str) -> Callable[..., Any]:
    """What is called for a method of a component: for `forward`, the module itself."""
    return module if method == "forward" else getattr(module, method)


def resolve(tensor: torch.Tensor, rule: Rule | None, rows: int) -> Rule:
    """What happens to a tensor of a call of `rows` rows."""
    if rule is None:
        return Batching.CAT if tensor.ndim and tensor.shape[0] == rows else Batching.SHARED
    if rule is Batching.STACK and tensor.shape not in ((), (1,)):
        return Batching.CAT
    return rule


def _merge(values: Sequence[Any], rule: Rule | None, calls: Sequence[Call]) -> Any:
    """One value for the batched forward, from the same place of each call's arguments."""
    first = values[0]
    if isinstance(rule, Equal):
        return first
    if isinstance(rule, Mask):
        return _mask(values, rule, calls)
    if isinstance(first, torch.Tensor):
        kind = resolve(first, rule, calls[0].rows)
        if kind in (Batching.CAT, Batching.PACKED):
            return torch.cat(values)
        if kind is Batching.INDEX:
            starts = accumulate((call.rows for call in calls), initial=0)
            return torch.cat([v + start for v, start in zip(values, starts, strict=False)])
        if isinstance(kind, Along):
            return torch.cat(values, dim=kind.dim)
        if kind is Batching.STACK:
            entries = [v.expand(call.rows) for v, call in zip(values, calls, strict=True)]
            return torch.cat(entries)
        return _pad(values, kind) if isinstance(kind, Ragged) else first
    if rule in _LISTS:
        return [entry for value in values for entry in value]
    if rule is Batching.PER_ROW:
        return first[:1] * sum(call.rows for call in calls)
    if isinstance(first, Mapping):
        merged = {key: _merge([v[key] for v in values], rule, calls) for key in first}
        return mapping_of(type(first), merged)
    if isinstance(first, list | tuple):
        entries = [_merge(entry, rule, calls) for entry in zip(*values, strict=True)]
        return sequence_of(type(first), entries)
    return first


def _mask(
    values: Sequence[torch.Tensor | None], rule: Mask, calls: Sequence[Call]
) -> torch.Tensor | None:
    """The masks of all calls, false over the padding; None if there is nothing to mask."""
    if all(value is None for value in values) and len({call.length for call in calls}) == 1:
        return None
    device = next(t for call in calls for t in _tensors(call)).device
    masks = [
        torch.ones(call.rows, call.length, dtype=rule.dtype, device=device)
        if value is None
        else value.to(rule.dtype)
        for value, call in zip(values, calls, strict=True)
    ]
    return _pad(masks, Ragged())


def _tensors(call: Call) -> Iterator[torch.Tensor]:
    yield from iter_tensors(call.args)
    yield from iter_tensors(call.kwargs)


def _pad(values: Sequence[torch.Tensor], rule: Ragged) -> torch.Tensor:
    """Concatenate along dimension 0, padded at the end of the ragged dimension."""
    dim = rule.dim % values[0].ndim
    longest = max(value.shape[dim] for value in values)
    if all(value.shape[dim] == longest for value in values):
        return torch.cat(list(values))
    shape = list(values[0].shape)
    shape[0], shape[dim] = sum(value.shape[0] for value in values), longest
    padded = values[0].new_full(shape, rule.fill)
    row = 0
    for value in values:
        target = padded[row : row + value.shape[0]]
        target.narrow(dim, 0, value.shape[dim]).copy_(value)
        row += value.shape[0]
    return padded


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device)
