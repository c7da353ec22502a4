# SPDX-License-Identifier: Apache-2.0
"""How much is left to do for a request: what its program has said, else what others of it did."""

from typing import TYPE_CHECKING

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.cost import CostModel, Mean
from vllm_omni.diffusion.jobs import Job

if TYPE_CHECKING:
    from vllm_omni.diffusion.collate import Collator


class Outlook:
    """Estimates of remaining work.

    Args:
        cost: What calls cost.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._typical: dict[Collator, Mean] = {}

    def ended(self, job: Job) -> None:
        """Learn from a job that was done to its end."""
        for collator in job.made.keys() - self._typical.keys():
            self._typical[collator] = Mean()
        for collator, calls in self._typical.items():
            calls.add(job.made.get(collator, 0))

    def calls_left(self, call: Call) -> float:
        """Calls of the same method that the job will make, this one included."""
        return max(1.0, self._calls_left(call.job, call.collator))

    def rest_s(self, call: Call) -> float:
        """What the job's calls of other methods will take."""
        return sum(
            self._calls_left(call.job, collator) * self._cost.call_s(collator)
            for collator in {**self._typical, **call.job.expected}  # in a fixed order
            if collator is not call.collator
        )

    def made_s(self, call: Call) -> float:
        """What the job's calls so far took, at their shares of forwards."""
        return sum(
            calls * self._cost.call_s(collator)
            for collator, calls in call.job.made.items()
            if collator is not call.collator
        )

    def _calls_left(self, job: Job, collator: "Collator") -> float:
        calls: float | None = job.expected.get(collator)
        if calls is None:
            typical = self._typical.get(collator)
            calls = 0.0 if typical is None else typical.value
        return max(0.0, calls - job.made.get(collator, 0))
