# SPDX-License-Identifier: Apache-2.0
"""What forwards cost: measured while serving, never probed for.

A bigger batch pays until the device is full. Where that is depends on the component and on the
sizes of its arguments (a 1 B transformer on an H200: 8 images of 256 px, 1 image of 1024 px), so it
is read off the forwards that run anyway: their speed by the size of the batch, in powers of two.
The first forward of a signature, which compiles and allocates, is not counted.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_omni.diffusion.calls import Batch, Call, GroupKey

if TYPE_CHECKING:
    from vllm_omni.diffusion.collate import Collator

SATURATED = 0.95
"""A batch whose speed is this share of the best one's is big enough."""
SHORT_S = 0.05
WEIGHT = 0.25
"""Of the newest measurement in a mean."""
RETRY = 64
"""One in so many forwards of a signature may be twice as big, in case that pays by now."""
RETRY_GAIN = 32
SIGNATURES = 1024
"""Signatures that are remembered; of more, those that have not run for longest are forgotten."""


class Mean:
    """A mean in which old values fade; 0 of nothing."""

    def __init__(self) -> None:
        self.value = 0.0
        self.known = False

    def add(self, value: float) -> None:
        """Take one more value."""
        self.value += (WEIGHT if self.known else 1.0) * (value - self.value)
        self.known = True


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a forward will be like.

    Attributes:
        seconds: How long it will take; 0 if that is not known.
        efficiency: Its speed as a share of the best that a batch of such calls reaches.
    """

    seconds: float
    efficiency: float


class SignatureCost:
    """Forwards of calls that can run together."""

    def __init__(self) -> None:
        self.call_s = Mean()
        self._speeds: dict[int, Mean] = {}
        self._tried: set[int] = set()
        self._asked = 0
        self._weighed = 0

    @property
    def known(self) -> bool:
        """Whether a forward was measured."""
        return self.call_s.known

    def observe(self, batch: Batch, seconds: float) -> None:
        """A forward took that long."""
        self.call_s.add(seconds / batch.calls)
        self._speeds.setdefault(_size_class(batch.work), Mean()).add(batch.work / seconds)

    def forecast(self, work: int) -> Forecast:
        """A forward of so much work, at the speed of the nearest size measured."""
        wanted = _size_class(work)
        speed = self._speeds[min(self._speeds, key=lambda size: abs(size - wanted))].value
        return Forecast(work / speed, speed / self._fastest())

    def room(self, short_s: float) -> float:
        """Work up to which the next batch should be filled; never less than runs in `short_s`.

        That is the smallest size measured that is about as fast as any. It is looked for where
        nothing is known yet: once at half that size, and above it if that was never exceeded.
        """
        fastest = self._fastest()
        enough = min(k for k, v in self._speeds.items() if v.value >= SATURATED * fastest)
        self._asked += 1
        if enough - 1 not in self._speeds and enough - 1 not in self._tried:
            self._tried.add(enough - 1)
            enough -= 1
        elif enough == max(self._speeds) or self._asked % RETRY == 0:
            enough += 1
        return max(_largest(enough), short_s * fastest)

    def gains(self, work: int, more: int) -> bool:
        """Whether a forward of more work than there is takes less time than two in its place.

        That is so as long as it is not known otherwise, and once in `RETRY_GAIN` forwards.
        """
        small, large = _size_class(work), _size_class(work + more)
        if small not in self._speeds or large not in self._speeds:
            return True
        self._weighed += 1
        faster = self._speeds[large].value > self._speeds[small].value
        return faster or self._weighed % RETRY_GAIN == 0

    def _fastest(self) -> float:
        return max(speed.value for speed in self._speeds.values())


class MethodCost:
    """Forwards of a component's method, whatever their signature."""

    def __init__(self) -> None:
        self.call_s = Mean()
        self.work_s = Mean()
        self.largest = 0
        self.memory = math.inf

    def observe(self, batch: Batch, seconds: float) -> None:
        """A forward took that long."""
        self.call_s.add(seconds / batch.calls)
        self.work_s.add(seconds / batch.work)

    def room(self, short_s: float) -> float:
        """Work up to which the first batches of a signature may be filled.

        Twice what is known to be bearable, so that a new size is approached step by step.
        """
        if not self.work_s.known:
            return math.inf
        return max(2 * self.largest, short_s / self.work_s.value)


class CostModel:
    """Learns from every forward what the next ones will cost. Times are in seconds.

    Args:
        short_s: A forward shorter than this is not made smaller to be over sooner.
    """

    def __init__(self, short_s: float = SHORT_S) -> None:
        self._short_s = short_s
        self._methods: dict[Collator, MethodCost] = {}
        self._signatures: OrderedDict[GroupKey, SignatureCost] = OrderedDict()

    def observe(self, batch: Batch, seconds: float) -> None:
        """A forward of this batch took that long."""
        method = self._method(batch.collator)
        method.largest = max(method.largest, batch.work)
        signature = self._signatures.get(batch.group)
        if signature is None:
            self._signatures[batch.group] = SignatureCost()
            if len(self._signatures) > SIGNATURES:
                self._signatures.popitem(last=False)
            return
        self._signatures.move_to_end(batch.group)
        signature.observe(batch, max(seconds, 1e-9))
        method.observe(batch, max(seconds, 1e-9))

    def out_of_memory(self, batch: Batch) -> None:
        """There was not enough memory for this batch; no other will be larger than its half."""
        method = self._method(batch.collator)
        method.memory = min(method.memory, batch.work / 2)

    def room(self, call: Call) -> float:
        """Work up to which a batch with this call should be filled."""
        method = self._method(call.collator)
        signature = self._signatures.get(call.group)
        if signature is not None and signature.known:
            return min(signature.room(self._short_s), method.memory)
        return min(method.room(self._short_s), method.memory)

    def gains(self, chosen: Sequence[Call], more: int) -> bool:
        """Whether to put more work into a forward of these calls takes less time than to do it
        by itself: with a mask that calls of one length need not, it may not."""
        signature = self._signatures.get(chosen[0].group)
        work = sum(call.work for call in chosen)
        return signature is None or not signature.known or signature.gains(work, more)

    def forecast(self, call: Call, calls: int) -> Forecast:
        """A forward of so many calls like this one."""
        signature = self._signatures.get(call.group)
        if signature is not None and signature.known:
            return signature.forecast(calls * call.work)
        return Forecast(self._method(call.collator).work_s.value * calls * call.work, 1.0)

    def share_s(self, call: Call) -> float:
        """The call's share of a forward with the usual company; 0 if unknown."""
        signature = self._signatures.get(call.group)
        if signature is not None and signature.known:
            return signature.call_s.value
        return self._method(call.collator).work_s.value * call.work

    def call_s(self, collator: "Collator") -> float:
        """A call's share of a forward of that method; 0 if unknown."""
        return self._method(collator).call_s.value

    def _method(self, collator: "Collator") -> MethodCost:
        method = self._methods.get(collator)
        if method is None:
            method = self._methods[collator] = MethodCost()
        return method


def _size_class(work: int) -> int:
    return work.bit_length()


def _largest(size_class: int) -> int:
    """The most work of a size class."""
    return (1 << size_class) - 1
