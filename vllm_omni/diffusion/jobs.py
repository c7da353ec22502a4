# SPDX-License-Identifier: Apache-2.0
"""What a program has done and will do: the unit of work that is put in order."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni.diffusion.collate import Collator


@dataclass(slots=True, eq=False)
class Job:
    """What a program does from its start, or from a message it waited for, to its next wait or end.

    Attributes:
        priority: Of the request; lower goes first.
        since_s: When it became possible, by the scheduler's clock.
        made: Calls so far, by the method called.
        expected: Calls in all, by the method called, as far as the program has said.
    """

    priority: int = 0
    since_s: float = 0.0
    made: dict["Collator", int] = field(default_factory=dict)
    expected: dict["Collator", int] = field(default_factory=dict)

    def expect(self, collator: "Collator", calls: int) -> None:
        """Say how many calls of a method will follow."""
        self.expected[collator] = self.made.get(collator, 0) + calls

    def count(self, collator: "Collator") -> None:
        """A call of this method was made."""
        self.made[collator] = self.made.get(collator, 0) + 1
