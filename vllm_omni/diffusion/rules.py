# SPDX-License-Identifier: Apache-2.0
"""How the calls of a component's method are put together: declarations that `collate` follows."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch


class Batching(Enum):
    """What happens to an argument when calls are put together.

    Without a rule, a tensor whose leading size is the call's batch size is `CAT`, any other tensor
    must have equal contents, and any other value must be equal.
    """

    CAT = "cat"
    """Tensors are concatenated along dimension 0. Of several with a rule, the first (positional
    ones, then by name) says how many rows the batch has; others may have a multiple of them."""
    SHARED = "shared"
    """Tensors must have equal contents; the caller does not change them in place afterwards, so
    they are compared once only."""
    STACK = "stack"
    """Tensors of one number, [] or [1], become one entry per batch row: [rows of all calls]."""
    INDEX = "index"
    """Tensors of row numbers: as `CAT`, counted on from call to call."""
    LIST = "list"
    """Lists are concatenated; their entries may have any shape."""
    ALIKE = "alike"
    """Lists are concatenated; their entries must all have the same shape."""
    PER_ROW = "per row"
    """Lists with one entry per batch row, all equal: repeated for the rows of all calls."""
    PACKED = "packed"
    """Tensors are concatenated along dimension 0, whose size says nothing about the batch's (the
    patches of all pictures)."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Tensors [rows, ...] of different sizes along `dim` are padded at its end, then concatenated.

    Only for methods whose kept outputs do not depend on the padding.

    Attributes:
        dim: The ragged dimension; not 0. Negative counts from the end.
        fill: Value of the padding.
    """

    dim: int = -1
    fill: float = 0


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask [rows, length] of the ragged arguments, true where they are valid.

    Calls may pass None for all valid; they are given ones where lengths differ.

    Attributes:
        dtype: What masks are converted to.
    """

    dtype: torch.dtype = torch.bool


@dataclass(frozen=True, slots=True)
class Along:
    """Tensors are concatenated along a dimension that is not the first.

    Attributes:
        dim: Where the batch's rows are.
    """

    dim: int


@dataclass(frozen=True, slots=True)
class Equal:
    """Values with equal keys are as good as each other: the first call's is passed on.

    Attributes:
        by: The key.
    """

    by: Callable[[Any], Hashable]


def _nothing(value: Any) -> None:
    return None


UNUSED = Equal(by=_nothing)
"""The method takes the argument but does not use it."""


@dataclass(frozen=True, slots=True)
class RaggedOutput:
    """How far outputs are valid when ragged arguments were padded.

    Attributes:
        length: Size of the argument along its ragged dimension -> valid size of the outputs.
        dim: The outputs' ragged dimension.
    """

    length: Callable[[int], int]
    dim: int = -1


Rule = Batching | Ragged | Mask | Along | Equal
"""What may be said about an argument."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How an output object that holds tensors is taken apart.

    Attributes:
        unpack: The object -> its tensors, as a tensor, mapping, list or tuple.
        pack: The same tree with a part of each tensor's rows -> an object of that class.
    """

    unpack: Callable[[Any], Any]
    pack: Callable[[Any], Any]


GRAPH_LENGTHS = (1, 2, 4, 8, 16, 25, 32, 50, 64, 100, 128, 200, 256)
"""Lengths that codec decoders have graphs for; others are padded to the next one."""
GRAPH_ROWS = (1, 2, 4, 8, 16, 32)
GRAPH_SIZE = 256
"""Rows times length up to which a forward takes as long as the host needs to launch it."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """The method is replayed from CUDA graphs where its inputs are small (and the stage is not
    `enforce_eager`). Its first argument is `Ragged`; it has positional ones only, and nothing of it
    leaves the device.

    Attributes:
        example: Rows and length -> arguments of that size, on any device.
        rows: Numbers of rows that there are graphs for.
        size: The largest product of the two.
    """

    example: Callable[[int, int], tuple[Any, ...]]
    rows: tuple[int, ...] = GRAPH_ROWS
    size: int = GRAPH_SIZE

    def examples(self, lengths: Sequence[int] = GRAPH_LENGTHS) -> list[tuple[Any, ...]]:
        """One of each size, the largest first.

        Args:
            lengths: Sizes along the ragged dimension; one row of each there is in any case.
        """
        pairs = [(r, n) for r in self.rows for n in lengths if r == 1 or r * n <= self.size]
        return [self.example(*pair) for pair in sorted(pairs, key=math.prod, reverse=True)]


@dataclass(frozen=True, slots=True)
class CallRules:
    """How calls of one method are put together and taken apart again.

    Attributes:
        arguments: Rules by parameter name; a rule holds for every tensor inside of the argument.
        ragged_output: Needed with a `Ragged` argument that the outputs' size follows.
        beside: Arguments by name -> tokens that run in one sequence with the ragged ones, so that
            little of the forward is padding even where the ragged lengths differ much.
        stacked_outputs: The outputs' leading size may be a multiple of the batch size: so many
            copies of the batch one after the other (classifier-free guidance inside of the model).
        inline: Calls run in the program, as if there were no engine: the method draws random
            numbers or keeps state on the model between the forwards that it makes.
        packings: Classes of output objects that are neither tensors nor mappings, lists or tuples.
        dropped_outputs: Outputs by name that callers do not use and that cannot be taken apart:
            left out where calls ran together.
        max_batch: Calls per forward, if fewer than the engine's limit; 1 for never together.
        graphs: See there; None for none.
        to_host: Results are moved to the CPU, those of a batch at once.
    """

    arguments: Mapping[str, Rule] = field(default_factory=dict)
    ragged_output: RaggedOutput | None = None
    beside: Callable[[Mapping[str, Any]], int] | None = None
    stacked_outputs: bool = False
    inline: bool = False
    packings: Mapping[type, Packing] = field(default_factory=dict)
    dropped_outputs: frozenset[str] = frozenset()
    max_batch: int | None = None
    graphs: Graphs | None = None
    to_host: bool = False
