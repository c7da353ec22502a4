# SPDX-License-Identifier: Apache-2.0
"""A program's call of a component, as the engine sees it while the program is parked on it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.switch import Autocast

if TYPE_CHECKING:
    from vllm_omni.diffusion.collate import Collator
    from vllm_omni.diffusion.program import Program


@dataclass(slots=True, eq=False)
class Call:
    """One parked call. Compared and hashed by identity.

    Attributes:
        program: The caller, which is given the result.
        collator: What knows how to run this component's method on several calls at once.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        job: What of the caller's work the call belongs to.
        variant: What the component is to be for it (see `Component.within`).
        autocast: The caller's autocast settings, under which the call runs.
        signature: Calls of one collator with equal signatures can run together.
        rows: Leading size of the call's batched arguments; 1 if it has none.
        length: Size of its ragged arguments along their ragged dimension; 0 if it has none.
        beside: Tokens that run in one sequence with the ragged ones.
        work: Elements of all its tensors: what its forward's time and memory grow with.
        serial: Number of the call in the order in which calls were parked.
        parked_s: When the call was parked, by the scheduler's clock.
        calls_left: Calls of the same method that its job will make, this one included.
        rest_s: Seconds that all else in its job will take.
        remaining_s: Seconds that its job will take from here on; 0 if that is not known.
        whole_s: Seconds that its job takes from its start to its end; 0 if that is not known.
        urgency: Its place among calls that it can run with; lower goes first.
    """

    program: "Program"
    collator: "Collator"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    job: Job = field(default_factory=Job)
    variant: Hashable = None
    autocast: Autocast = ()
    signature: Hashable = None
    rows: int = 1
    length: int = 0
    beside: int = 0
    work: int = 1
    serial: int = field(default=0, init=False)
    parked_s: float = field(default=0.0, init=False)
    calls_left: float = field(default=1.0, init=False)
    rest_s: float = field(default=0.0, init=False)
    remaining_s: float = field(default=0.0, init=False)
    whole_s: float = field(default=0.0, init=False)
    urgency: tuple[int, float] = field(default=(0, 0.0), init=False)
    _group: "GroupKey | None" = field(default=None, init=False)

    @property
    def group(self) -> "GroupKey":
        """Calls of equal groups can run in one forward. To be asked for once all is filled in."""
        if self._group is None:
            self._group = GroupKey(self.collator, self.autocast, self.signature, self.variant)
        return self._group


class GroupKey:
    """What calls must have in common to run together; hashed once, for signatures are long.

    Args:
        parts: What must be equal.
    """

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Hashable) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupKey) and self._parts == other._parts


@dataclass(frozen=True, slots=True)
class Batch:
    """What is remembered of calls that run in one forward; holds no tensors.

    Attributes:
        collator: Of all of them.
        group: Of all of them.
        calls: How many they are.
        work: Of all of them together.
    """

    collator: "Collator"
    group: GroupKey
    calls: int
    work: int

    @classmethod
    def of(cls, calls: Sequence[Call]) -> "Batch":
        """Describe calls of one group."""
        first = calls[0]
        return cls(first.collator, first.group, len(calls), sum(call.work for call in calls))
