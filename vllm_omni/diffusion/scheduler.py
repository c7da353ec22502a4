# SPDX-License-Identifier: Apache-2.0
"""Which parked calls run next, and how many of them together."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import count
from typing import TYPE_CHECKING

from vllm_omni.diffusion.calls import Batch, Call
from vllm_omni.diffusion.cost import CostModel
from vllm_omni.diffusion.express import Express
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.lanes import Group, Lane
from vllm_omni.diffusion.outlook import Outlook
from vllm_omni.diffusion.policy import Policy

if TYPE_CHECKING:
    from vllm_omni.diffusion.collate import Collator


class CallScheduler:
    """Holds the parked calls, and picks what runs next.

    The policy says which group of calls is next; its most urgent ones run, up to the size at which
    the cost model says that the device is full, and with a short request's call no more than leave
    it short.

    Args:
        max_batch: Most calls per forward.
        policy: In which order calls run.
        cost: Says what forwards cost and how big they should be.
        max_padding: Share of a forward's ragged input that may be padding.
        clock: The time in seconds.
    """

    def __init__(
        self,
        max_batch: int,
        policy: Policy | None = None,
        cost: CostModel | None = None,
        *,
        max_padding: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self._max_batch = max_batch
        self._policy = policy or Policy()
        self._max_padding = max_padding
        self._clock = clock
        self._cost = cost or CostModel()
        self._outlook = Outlook(self._cost)
        self._express = Express(self._policy)
        self._serials = count()
        self._overdue_in = 0
        self._room = 0.0
        # Oldest first; a dict serves as an ordered set.
        self._calls: dict[Call, None] = {}
        self._lanes: dict[Collator, Lane] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def begin_job(self, priority: int) -> Job:
        """What a program will do that can run from now on."""
        return Job(priority, self._clock())

    def end_job(self, job: Job) -> None:
        """The program is done, or waits for a message."""
        self._outlook.ended(job)

    def add(self, call: Call) -> None:
        """Take a call that has just been parked."""
        call.calls_left = self._outlook.calls_left(call)
        call.rest_s = self._outlook.rest_s(call)
        share_s = self._cost.share_s(call)
        call.remaining_s = call.calls_left * share_s + call.rest_s
        made_s = call.job.made.get(call.collator, 0) * share_s + self._outlook.made_s(call)
        call.whole_s = made_s + call.remaining_s
        call.job.count(call.collator)
        call.serial = next(self._serials)
        call.parked_s = self._clock()
        call.urgency = self._urgency(call, share_s)
        self._calls[call] = None
        lane = self._lanes.get(call.collator)
        if lane is None:
            lane = self._lanes[call.collator] = Lane()
        lane.add(call)

    def discard(self, call: Call) -> None:
        """Forget a call, if it is here: it runs, or its program is gone."""
        if call not in self._calls:
            return
        del self._calls[call]
        lane = self._lanes[call.collator]
        lane.discard(call)
        if not lane:
            del self._lanes[call.collator]

    def select(self) -> list[Call]:
        """Take out the calls of the next forward; empty if none is parked."""
        if not self._calls:
            return []
        if (anchor := self._overdue()) is not None:
            chosen, early = self._fill(anchor)
        else:
            usual = self._next()
            shorter = self._express.shorter(self._calls, usual)
            anchor = min(shorter, key=_urgency, default=usual)
            chosen, early = self._fill(anchor)
            early = early or anchor is not usual
        self._express.ran(self._cost.forecast(anchor, len(chosen)).seconds, early)
        self._pass_over(chosen)
        return chosen

    def company(self, chosen: Sequence[Call], foresee: Callable[[Call], Call | None]) -> list[Call]:
        """Calls that nobody has made yet, to fill up what `select` has just chosen.

        Only what the calls that are parked leave free is filled.

        Args:
            chosen: By `select`.
            foresee: A chosen call -> a call of the same group that will follow it, if one is known.
        """
        more: list[Call] = []
        room = self._room - sum(call.work for call in chosen)
        for call in chosen:
            if len(chosen) + len(more) >= self._limit(call) or room < call.work:
                break
            foreseen = foresee(call)
            if foreseen is None or foreseen.work > room:
                continue
            if self._padding([*chosen, *more, foreseen]) <= self._max_padding:
                more.append(foreseen)
                room -= foreseen.work
        if not self._cost.gains(chosen, sum(call.work for call in more)):
            return []
        return more

    @staticmethod
    def _padding(calls: Sequence[Call]) -> float:
        """The share of the ragged input of a forward of these calls that is padding."""
        lengths = [call.length + call.beside for call in calls]
        used = sum(length * call.rows for length, call in zip(lengths, calls, strict=True))
        whole = max(lengths) * sum(call.rows for call in calls)
        return 1 - used / whole if whole else 0.0

    def ran(self, batch: Batch, seconds: float) -> None:
        """Learn how long a forward took."""
        self._cost.observe(batch, seconds)

    def ran_out_of_memory(self, batch: Batch) -> None:
        """Learn that a batch is too big."""
        self._cost.out_of_memory(batch)

    def _overdue(self) -> Call | None:
        """The call that has waited for longest, if that is too long and it is time for such."""
        if self._overdue_in > 0:
            self._overdue_in -= 1
            return None
        oldest = next(iter(self._calls))
        if self._clock() - oldest.parked_s < self._policy.patience_s:
            return None
        self._overdue_in = self._policy.overdue_every - 1
        return oldest

    def _next(self) -> Call:
        """The first call of a component whose turn it is, else of all; of the lowest priority."""
        best = [(lane, min(lane, key=self._group_urgency)) for lane in self._lanes.values()]
        priority = min(self._group_urgency(group)[0] for _, group in best)
        best = [each for each in best if self._group_urgency(each[1])[0] == priority]
        turns = [self._turns(lane, group) for lane, group in best]
        if (most := max(turns)) >= 1:
            return best[turns.index(most)][1].first()
        return min((group for _, group in best), key=self._group_urgency).first()

    def _group_urgency(self, group: Group) -> tuple[int, float]:
        """The urgency of a group's first call, at its share of the forward that is possible now."""
        if group.urgency is None:
            calls = min(len(group), self._limit(group.first()))
            forecast = self._cost.forecast(group.first(), calls)
            group.urgency = self._urgency(group.first(), forecast.seconds / calls)
        return group.urgency

    def _urgency(self, call: Call, share_s: float) -> tuple[int, float]:
        remaining_s = call.calls_left * share_s + call.rest_s
        return self._policy.urgency(call.job.priority, remaining_s, call.job.since_s)

    def _turns(self, lane: Lane, group: Group) -> float:
        """How many turns a lane has missed. Of unknown forwards, every one of others is one."""
        calls = min(len(group), self._limit(group.first()))
        forecast = self._cost.forecast(group.first(), calls)
        if not forecast.seconds:
            return lane.passed
        return self._policy.turns(lane.waited_s, forecast.seconds, forecast.efficiency)

    def _pass_over(self, chosen: list[Call]) -> None:
        """Note that all lanes but that of the chosen calls have to wait."""
        forward_s = self._cost.forecast(chosen[0], len(chosen)).seconds
        for collator, lane in self._lanes.items():
            own = collator is chosen[0].collator
            lane.passed = 0 if own else lane.passed + 1
            lane.waited_s = 0.0 if own else lane.waited_s + forward_s

    def _limit(self, call: Call) -> int:
        return min(self._max_batch, call.collator.max_batch or self._max_batch)

    def _fill(self, anchor: Call) -> tuple[list[Call], bool]:
        """Take out a call and those that run with it; and whether longer ones stay for its sake."""
        group, limit = self._lanes[anchor.collator].group(anchor), self._limit(anchor)
        self._room = room = self._cost.room(anchor)
        chosen = [anchor]
        self.discard(anchor)
        longer = self._express.longer(group, anchor)
        if not longer:
            self._join(chosen, group, limit, room)
            return chosen, False
        priority, apart = anchor.job.priority, set(longer)
        peers = [c for c in group if c not in apart and c.job.priority <= priority]
        self._join(chosen, peers, limit, room)
        bearable = self._bearable(anchor, len(chosen), limit)
        self._join(chosen, longer, bearable, room)
        left = not apart <= set(chosen)
        return chosen, left and len(chosen) == bearable < limit

    def _bearable(self, anchor: Call, calls: int, limit: int) -> int:
        """Up to how many calls a forward of so many may grow without getting much longer."""
        bearable_s = self._policy.company * self._cost.forecast(anchor, calls).seconds
        sizes = range(limit, calls, -1)
        fitting = (n for n in sizes if self._cost.forecast(anchor, n).seconds <= bearable_s)
        return next(fitting, calls)

    def _join(self, chosen: list[Call], calls: Iterable[Call], limit: int, room: float) -> None:
        """Take out calls that run with those chosen, as long as there is room for the next."""
        room -= sum(call.work for call in chosen)
        for call in self._in_order(chosen, calls, limit - len(chosen)):
            room -= call.work
            if room < 0:
                return
            chosen.append(call)
            self.discard(call)

    def _in_order(
        self, chosen: Sequence[Call], calls: Iterable[Call], count: int
    ) -> Iterable[Call]:
        """The first of some calls that may run with those chosen."""
        if chosen[0].length:
            return self._nearest(chosen, calls, count)
        return nsmallest(count, calls, key=_urgency)

    def _nearest(self, chosen: Sequence[Call], calls: Iterable[Call], count: int) -> Iterator[Call]:
        """Calls of lengths near the first's, as long as not too much of the batch is padding."""
        anchor = chosen[0]

        def nearness(call: Call) -> tuple[int, int, float]:
            priority, urgency = call.urgency
            return priority, abs(call.length - anchor.length), urgency

        longest = max(call.length + call.beside for call in chosen)
        rows = sum(call.rows for call in chosen)
        used = sum((call.length + call.beside) * call.rows for call in chosen)
        for call in nsmallest(count, calls, nearness):
            length = call.length + call.beside
            longest = max(longest, length)
            used += length * call.rows
            rows += call.rows
            if used < (1 - self._max_padding) * longest * rows:
                return
            yield call


def _urgency(call: Call) -> tuple[tuple[int, float], int]:
    return call.urgency, call.serial
