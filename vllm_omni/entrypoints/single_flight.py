# SPDX-License-Identifier: Apache-2.0
"""A bounded cache whose values are made once, however many ask for them meanwhile (row A-61)."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class SingleFlightCache(Generic[V]):
    """Values by key; the one used longest ago goes first. For one event loop.

    Args:
        max_entries: Most values.
        max_bytes: Most bytes of all values; a larger one is made, and not kept.
        size_of: Bytes of a value.
    """

    def __init__(self, max_entries: int, max_bytes: int, size_of: Callable[[V], int]) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[Any, V] = OrderedDict()
        self._making: dict[Any, asyncio.Task[V]] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._nbytes

    def known(self, key: Any) -> V | None:
        """A value that has been made; no value is None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def keep(self, key: Any, value: V) -> None:
        """Remember a value, if there is room for one of its size at all."""
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        if key in self._values:
            self._nbytes -= self._size_of(self._values.pop(key))
        self._values[key] = value
        self._nbytes += size
        while len(self._values) > self._max_entries or self._nbytes > self._max_bytes:
            _, oldest = self._values.popitem(last=False)
            self._nbytes -= self._size_of(oldest)

    async def get(self, key: Any, make: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """A value; made if nobody has made it or is making it.

        A caller who is cancelled leaves what is made to the others. A failure is every waiting
        caller's, and not kept.
        """
        if (known := self.known(key)) is not None:
            return known
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._made(key, done))
        return await asyncio.shield(task)

    def _made(self, key: Any, task: asyncio.Task[V]) -> None:
        del self._making[key]
        if not task.cancelled() and task.exception() is None:
            self.keep(key, task.result())
