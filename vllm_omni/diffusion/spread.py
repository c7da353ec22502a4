# SPDX-License-Identifier: Apache-2.0
"""What a collator needs where forwards run on more than this process's device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_omni.diffusion.switch import Autocast


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of one forward; tensors are on the device."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Spread(Protocol):
    """Runs forwards of one method on several devices."""

    @property
    def width(self) -> int:
        """How many of them run at the same time."""

    def run(
        self, forward: Callable[..., Any], autocast: Autocast, shares: Sequence[Arguments]
    ) -> list[Any]:
        """Run a forward for each share, at most `width` of them; gives their results in order.

        Args:
            forward: The method, on this process's device.
            autocast: Settings to run under.
            shares: What each is to be given.

        Raises:
            Exception: Whatever the forward raises.
        """
