# SPDX-License-Identifier: Apache-2.0
"""Short requests among much longer ones: they need not pay for company.

On a device that is full, a forward takes as long as all of its calls together. A request of a few
steps that shares each of its forwards with many requests of many steps would take as many times as
long as alone, and the others would gain nothing. So calls of much shorter jobs go first, and calls
of much longer jobs join them only as far as that costs the short ones little.

What this may cost the long ones is bounded: device time is lent for it, and earned by all other
forwards.
"""

from typing import TYPE_CHECKING

from vllm_omni.diffusion.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_omni.diffusion.calls import Call


class Express:
    """Which calls are express ones, and how many more forwards of such there may be.

    Args:
        policy: With the bounds.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._credit_s = policy.express_burst_s

    def shorter(self, calls: "Iterable[Call]", anchor: "Call") -> "list[Call]":
        """Those of the anchor's priority that may go before it: of much shorter jobs."""
        if self._credit_s <= 0:
            return []
        return [
            call
            for call in calls
            if call.job.priority == anchor.job.priority and self._much_longer(anchor, call)
        ]

    def longer(self, calls: "Iterable[Call]", anchor: "Call") -> "list[Call]":
        """Those of the anchor's priority that may join it only as far as they cost it little."""
        if self._credit_s <= 0:
            return []
        return [
            call
            for call in calls
            if call.job.priority == anchor.job.priority and self._much_longer(call, anchor)
        ]

    def ran(self, seconds: float, early: bool) -> None:
        """Account for a forward.

        Args:
            seconds: How long it takes.
            early: Calls of longer jobs had to wait for it.
        """
        if early:
            self._credit_s -= seconds
        else:
            earned = self._credit_s + self._policy.express_share * seconds
            self._credit_s = min(self._policy.express_burst_s, earned)

    def _much_longer(self, call: "Call", than: "Call") -> bool:
        """Whether one job takes many times as long as another, both from their starts to their
        ends: by what is left of them, each request would be a short one at its end."""
        return 0 < self._policy.much * than.whole_s <= call.whole_s
