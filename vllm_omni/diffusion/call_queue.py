# SPDX-License-Identifier: Apache-2.0
"""Parked calls in order of urgency."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from vllm_omni.diffusion.calls import Call

SLACK = 64


class CallQueue:
    """A priority queue from which any call can be taken.

    The heap holds numbers only, so a call that is gone is not kept alive by what is left of it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float], int]] = []
        self._calls: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        """In no particular order."""
        return iter(self._calls.values())

    def add(self, call: Call) -> None:
        """Put a call in."""
        self._calls[call.serial] = call
        heappush(self._heap, (call.urgency, call.serial))

    def discard(self, call: Call) -> None:
        """Take a call out, if it is here."""
        if self._calls.pop(call.serial, None) is None:
            return
        if len(self._heap) > 2 * len(self._calls) + SLACK:
            self._heap = [(each.urgency, number) for number, each in self._calls.items()]
            heapify(self._heap)

    def first(self) -> Call:
        """The most urgent call, which stays; among equals, the oldest. There must be one."""
        while self._heap[0][1] not in self._calls:
            heappop(self._heap)
        return self._calls[self._heap[0][1]]
