# SPDX-License-Identifier: Apache-2.0
"""Who may come in, when, and for how long: the one bound on what a server has to hold.

As many requests are let in as the stages can work on. The others wait at the door, with nothing
read of them yet, and clients take turns. How many may wait is bounded, in total and for each
client; who finds no place is refused at once, with an estimate of when to come again.

HTTP requests are let in by `openai/admission.py`, before their body is read; calls of `AsyncOmni`
from Python by `AsyncOmni` itself. Both by `Admission`.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

from vllm_omni.config.limits import ServingLimits
from vllm_omni.entrypoints.fair_queue import FairQueue
from vllm_omni.errors import DeadlineExceededError, OmniClientError, OverloadedError
from vllm_omni.metrics.loop_lag import LoopLagProbe
from vllm_omni.metrics.overload import OverloadMetrics

RECENT = 0.1
"""Weight of the newest service time in the mean."""
MAX_RETRY_AFTER_S = 600


class Ticket:
    """A request that has been let in. It counts until everyone who holds it has let it go.

    Attributes:
        client: Whose it is.
        deadline: When it has to be over, by the event loop's clock.
        turn: Whether it takes one of the slots, rather than a waiting place.
        in_use: Whether the engine works on it.
    """

    def __init__(
        self, admission: "Admission", client: str, deadline: float, now: float, turn: bool
    ) -> None:
        self._admission = admission
        self._holders = 1
        self.client = client
        self.deadline = deadline
        self.began = now
        self.turn = turn
        self.in_use = False

    @property
    def over(self) -> bool:
        """Whether nobody holds it any more."""
        return self._holders == 0

    def hold(self) -> None:
        """Hold it once more."""
        self._holders += 1

    def release(self) -> None:
        """Let it go."""
        self._holders -= 1
        if self._holders == 0:
            self._admission._leave(self)


current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)
"""That of the HTTP request which the running code works for."""

current_client: ContextVar[str] = ContextVar("current_client", default="local")
"""Whose the HTTP request or WebSocket is that the running code works for."""


class Admission:
    """Lets requests in.

    Args:
        slots: Most requests that are worked on at a time.
        limits: How many may come, and how long they may stay.
    """

    def __init__(self, slots: int, limits: ServingLimits) -> None:
        self.limits = limits
        self.metrics = OverloadMetrics()
        self._slots = min(slots, limits.max_num_queued_reqs)
        self._places = limits.max_num_queued_reqs - self._slots
        self._running = 0
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._extra: Counter[str] = Counter()
        self._service_s: float | None = None
        self._probe = LoopLagProbe(self.metrics.loop_lag)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    def deadline(self, timeout: float | None = None) -> float:
        """When a request that comes now has to be over, by the event loop's clock."""
        most = self.limits.request_timeout
        return asyncio.get_running_loop().time() + (most if timeout is None else min(timeout, most))

    def retry_after_s(self) -> int:
        """Whole seconds until what waits now will have been worked on, by recent requests."""
        if self._service_s is None:
            return 1
        ahead = (len(self._queue) + 1) / max(1, self._slots)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._service_s * ahead)))

    def try_enter(self, client: str, deadline: float) -> Ticket | None:
        """Let a request in at once; None if it has to wait."""
        if self._running >= self._slots or self._queue:
            return None
        self._running += 1
        self._probe.start()
        return self._ticket(client, deadline, waited_s=0.0)

    async def enter(self, client: str, deadline: float) -> Ticket:
        """Let a request in as soon as it is its turn.

        Raises:
            OverloadedError: There is no place to wait.
            DeadlineExceededError: Its turn did not come in time.
        """
        ticket = self.try_enter(client, deadline)
        if ticket is not None:
            return ticket
        self.check_room(client)
        loop = asyncio.get_running_loop()
        came = loop.time()
        turn = loop.create_future()
        self._queue.put(client, turn)
        self._report()
        try:
            await _by(deadline, turn)
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came just now, too late
                self._end_turn()
            else:
                self._queue.remove(client, turn)
                self._report()
            if isinstance(error, TimeoutError):
                self.metrics.deadline_exceeded()
                raise DeadlineExceededError("the request timed out before its turn came") from None
            raise
        return self._ticket(client, deadline, loop.time() - came)

    @asynccontextmanager
    async def working(self, timeout: float | None, completions: int = 1) -> AsyncIterator[Ticket]:
        """While the engine works on a request.

        The first of an HTTP request is let in with that; further ones at the same time (a batch of
        prompts, `n` completions of one) take a waiting place each, without waiting. One from Python
        comes in by itself, with all of its completions.

        Args:
            timeout: Seconds that it may take; None for what the server allows.
            completions: What it asks for.

        Raises:
            OmniClientError: It asks for more completions than the server takes requests.
            OverloadedError: There are too many.
            DeadlineExceededError: Its turn did not come in time.
        """
        outer = current_ticket.get()
        places = completions - 1
        if outer is None or outer.over:
            places = 0
            ticket = await self.enter(current_client.get(), self.deadline(timeout))
        elif outer.in_use:
            ticket = self._enter_beside(outer)
        else:
            outer.hold()
            ticket = outer
        ticket.in_use = True
        try:
            with self._beside(ticket.client, places):
                yield ticket
        finally:
            ticket.in_use = False
            ticket.release()

    @contextmanager
    def _beside(self, client: str, places: int) -> Iterator[None]:
        """While a request takes places beside its own."""
        if places >= self.limits.max_num_queued_reqs:
            raise OmniClientError(
                f"`n` is {places + 1}: this server takes {self.limits.max_num_queued_reqs} "
                "completions at a time",
                param="n",
            )
        if places:
            self.check_room(client, places)
        self._extra[client] += places
        try:
            yield
        finally:
            self._extra -= Counter({client: places})

    def take_place(self, client: str) -> Ticket:
        """A waiting place for a request whose work will come in later, by itself.

        Raises:
            OverloadedError: There is none.
        """
        if self._running >= self._slots or self._queue:
            self.check_room(client)
        return self._place(client, self.deadline())

    def _enter_beside(self, outer: Ticket) -> Ticket:
        self.check_room(outer.client)
        return self._place(outer.client, outer.deadline)

    def _place(self, client: str, deadline: float) -> Ticket:
        self._extra[client] += 1
        now = asyncio.get_running_loop().time()
        return Ticket(self, client, deadline, now, turn=False)

    def check_room(self, client: str, places: int = 1) -> None:
        """See that a client may have further places.

        It may have as many places as are left: alone half of them, and among n clients 1 / (n + 1)
        each, so that there is one for whoever comes next.

        Raises:
            OverloadedError: It may not.
        """
        free = self._places - len(self._queue) - self._extra.total()
        # As if they were taken one after the other.
        if self._queue.count(client) + self._extra[client] + places > free - (places - 1):
            self.metrics.rejected()
            who = "this server" if free <= 0 else "this client"
            raise OverloadedError(f"too many requests of {who} wait already; try again later")

    def _ticket(self, client: str, deadline: float, waited_s: float) -> Ticket:
        self.metrics.admitted(waited_s)
        now = asyncio.get_running_loop().time()
        return Ticket(self, client, deadline, now, turn=True)

    def _leave(self, ticket: Ticket) -> None:
        if not ticket.turn:
            self._extra -= Counter({ticket.client: 1})
            return
        took = asyncio.get_running_loop().time() - ticket.began
        mean = took if self._service_s is None else self._service_s
        self._service_s = mean + RECENT * (took - mean)
        self._end_turn()

    def _end_turn(self) -> None:
        self._running -= 1
        while self._queue and self._running < self._slots:
            turn = self._queue.pop()
            if not turn.done():  # else its request is being cancelled
                turn.set_result(None)
                self._running += 1
        self._report()
        if self._running == 0:
            self._probe.stop()

    def _report(self) -> None:
        self.metrics.waiting(len(self._queue), self._queue.clients)


async def _by(deadline: float, turn: asyncio.Future[None]) -> None:
    async with asyncio.timeout_at(deadline):
        await turn
