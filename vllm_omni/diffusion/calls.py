# SPDX-License-Identifier: Apache-2.0
"""A program's call of a component, as the engine sees it while the program is parked on it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
        autocast: The caller's autocast settings, under which the call runs.
        signature: Calls of one collator with equal signatures can run together.
        rows: Leading size of the call's batched arguments; 1 if it has none.
        length: Size of its ragged arguments along their ragged dimension; 0 if it has none.
        born: The scheduler's tick when the call was parked.
    """

    program: "Program"
    collator: "Collator"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast = ()
    signature: Hashable = None
    rows: int = 1
    length: int = 0
    born: int = field(default=0, init=False)

    @property
    def group(self) -> Hashable:
        """Calls of the same group can run in one forward."""
        return self.collator, self.autocast, self.signature
