# SPDX-License-Identifier: Apache-2.0
"""Which parked calls run next."""

from collections.abc import Hashable

from vllm_omni.diffusion.calls import Call


class CallScheduler:
    """Holds the parked calls in groups that can run together, and picks what runs next.

    The largest group goes first, since it is the most work per forward; a call that has been
    passed over `patience` times goes first with its group, so nothing starves.

    Args:
        max_batch: Most calls per forward.
        patience: Forwards that a call may wait for larger groups.
        max_padding: Share of a forward's ragged input that may be padding.
    """

    def __init__(self, max_batch: int, patience: int = 8, max_padding: float = 0.25) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        self._max_batch = max_batch
        self._patience = patience
        self._max_padding = max_padding
        self._tick = 0
        # Dicts serve as ordered sets: oldest first.
        self._groups: dict[Hashable, dict[Call, None]] = {}
        self._calls: dict[Call, None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Take a call that has just been parked."""
        call.born = self._tick
        self._calls[call] = None
        self._groups.setdefault(call.group, {})[call] = None

    def discard(self, call: Call) -> None:
        """Forget a call, if it is here: it runs, or its program is gone."""
        if call not in self._calls:
            return
        del self._calls[call]
        group = self._groups[call.group]
        del group[call]
        if not group:
            del self._groups[call.group]

    def select(self) -> list[Call]:
        """Take out the calls of the next forward; empty if none is parked."""
        if not self._calls:
            return []
        oldest = next(iter(self._calls))
        if self._tick - oldest.born >= self._patience:
            group = self._groups[oldest.group]
        else:
            group = max(self._groups.values(), key=self._size)
        self._tick += 1
        chosen = self._fill(group)
        for call in chosen:
            self.discard(call)
        return chosen

    def _limit(self, call: Call) -> int:
        return min(self._max_batch, call.collator.max_batch or self._max_batch)

    def _size(self, group: dict[Call, None]) -> int:
        return min(len(group), self._limit(next(iter(group))))

    def _fill(self, group: dict[Call, None]) -> list[Call]:
        """The group's oldest call and those that fit best to it."""
        anchor = next(iter(group))
        limit = self._limit(anchor)
        if not anchor.length:
            return list(group)[:limit]
        chosen: list[Call] = []
        longest = used = rows = 0
        for call in sorted(group, key=lambda call: abs(call.length - anchor.length)):
            longest = max(longest, call.length)
            used += call.length * call.rows
            rows += call.rows
            if len(chosen) == limit or used < (1 - self._max_padding) * longest * rows:
                break
            chosen.append(call)
        return chosen
