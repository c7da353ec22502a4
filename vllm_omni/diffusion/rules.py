# SPDX-License-Identifier: Apache-2.0
"""How the calls of a component's method are put together: declarations that `collate` follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Batching(Enum):
    """What happens to an argument when calls are put together.

    Without a rule, a tensor whose leading size is the call's batch size is `CAT`, any other tensor
    must have equal contents, and any other value must be equal.
    """

    CAT = "cat"
    """Tensors are concatenated along dimension 0."""
    SHARED = "shared"
    """Tensors must have equal contents; the caller does not change them in place afterwards, so
    they are compared once only."""
    STACK = "stack"
    """0-dimensional tensors become one entry per batch row: [rows of all calls]."""
    LIST = "list"
    """Lists are concatenated; their entries may have any shape."""


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
class RaggedOutput:
    """How far outputs are valid when ragged arguments were padded.

    Attributes:
        length: Size of the argument along its ragged dimension -> valid size of the outputs.
        dim: The outputs' ragged dimension.
    """

    length: Callable[[int], int]
    dim: int = -1


@dataclass(frozen=True, slots=True)
class CallRules:
    """How calls of one method are put together and taken apart again.

    Attributes:
        arguments: Rules by parameter name; a rule holds for every tensor inside of the argument.
        ragged_output: Needed with a `Ragged` argument.
        stacked_outputs: The outputs' leading size may be a multiple of the batch size: so many
            copies of the batch one after the other (classifier-free guidance inside of the model).
        max_batch: Calls per forward, if fewer than the engine's limit; 1 for never together.
    """

    arguments: Mapping[str, Batching | Ragged] = field(default_factory=dict)
    ragged_output: RaggedOutput | None = None
    stacked_outputs: bool = False
    max_batch: int | None = None
