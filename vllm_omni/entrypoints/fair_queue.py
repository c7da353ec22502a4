# SPDX-License-Identifier: Apache-2.0
"""A queue in which clients take turns."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out for each client, and round robin over the clients."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def clients(self) -> int:
        """How many clients have something in the queue."""
        return len(self._by_client)

    def count(self, client: str) -> int:
        """How much of the queue is a client's."""
        return len(self._by_client.get(client, ()))

    def put(self, client: str, item: T) -> None:
        """Add an item behind the client's other ones."""
        self._by_client.setdefault(client, deque()).append(item)
        self._size += 1

    def pop(self) -> T:
        """The oldest item of the client whose turn it is.

        Raises:
            IndexError: The queue is empty.
        """
        if not self._by_client:
            raise IndexError("pop from an empty queue")
        client, items = next(iter(self._by_client.items()))
        item = items.popleft()
        self._size -= 1
        if items:
            self._by_client.move_to_end(client)
        else:
            del self._by_client[client]
        return item

    def remove(self, client: str, item: T) -> bool:
        """Take an item out; False if it is not there."""
        items = self._by_client.get(client)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._size -= 1
        if not items:
            del self._by_client[client]
        return True
