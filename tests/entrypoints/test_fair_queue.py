# SPDX-License-Identifier: Apache-2.0
"""Clients take turns, whatever they put into the queue and take out of it again."""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_omni.entrypoints.fair_queue import FairQueue

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

CLIENTS = ("a", "b", "c", "d")


class Turns(RuleBasedStateMachine):
    """A queue, what it should hold, and how often each client has been passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.expected: dict[str, deque[int]] = {client: deque() for client in CLIENTS}
        self.passed_over = dict.fromkeys(CLIENTS, 0)
        self.serial = 0

    @rule(client=st.sampled_from(CLIENTS), count=st.integers(1, 5))
    def put(self, client: str, count: int) -> None:
        for _ in range(count):
            self.serial += 1
            self.queue.put(client, self.serial)
            self.expected[client].append(self.serial)

    @precondition(lambda self: len(self.queue))
    @rule()
    def pop(self) -> None:
        item = self.queue.pop()
        served = next(c for c in CLIENTS if self.expected[c] and self.expected[c][0] == item)
        self.expected[served].popleft()
        for client in CLIENTS:
            waits = client != served and self.expected[client]
            self.passed_over[client] = self.passed_over[client] + 1 if waits else 0

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([c for c in CLIENTS if self.expected[c]]))
        item = data.draw(st.sampled_from(list(self.expected[client])))
        assert self.queue.remove(client, item)
        assert not self.queue.remove(client, item)
        self.expected[client].remove(item)
        if not self.expected[client]:
            self.passed_over[client] = 0

    @invariant()
    def counts(self) -> None:
        assert [self.queue.count(c) for c in CLIENTS] == [len(self.expected[c]) for c in CLIENTS]
        assert len(self.queue) == sum(map(len, self.expected.values()))
        assert self.queue.clients == sum(map(bool, self.expected.values()))

    @invariant()
    def nobody_is_passed_over_by_a_client_twice(self) -> None:
        assert max(self.passed_over.values()) < len(CLIENTS)


TestTurns = Turns.TestCase


def test_an_empty_queue_says_so() -> None:
    with pytest.raises(IndexError, match="empty"):
        FairQueue[int]().pop()
