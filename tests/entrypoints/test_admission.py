# SPDX-License-Identifier: Apache-2.0
"""The bound on what a server takes on, on its own and as the door of an ASGI application."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from vllm_omni.config.limits import ServingLimits
from vllm_omni.entrypoints.admission import Admission, Ticket, current_client, current_ticket
from vllm_omni.entrypoints.openai.admission import AdmissionMiddleware, client_of
from vllm_omni.entrypoints.openai.middleware import BodyLimitMiddleware
from vllm_omni.errors import DeadlineExceededError, OmniClientError, OverloadedError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

WAIT_S = 5.0
CHAT = "/v1/chat/completions"


def admission(slots: int, most: int, **limits: float) -> Admission:
    return Admission(slots, ServingLimits(max_num_queued_reqs=most, **limits))  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def waiting(it: Admission, *clients: str) -> list[asyncio.Task[Ticket]]:
    tasks = [asyncio.create_task(it.enter(client, it.deadline())) for client in clients]
    await settle()
    return tasks


async def test_clients_take_turns_for_slots() -> None:
    it = admission(slots=1, most=100)
    ticket = await it.enter("greedy", it.deadline())
    tasks = await waiting(it, *["greedy"] * 5, "modest", "late")
    order = []
    for _ in tasks:
        ticket.release()
        await settle()
        ticket = next(t for t in tasks if t.done() and not t.result().over).result()
        order.append(ticket.client)
    assert order == ["greedy", "modest", "late", *["greedy"] * 4]
    ticket.release()
    assert (it.running, it.waiting) == (0, 0)


async def test_a_client_never_fills_the_queue() -> None:
    it = admission(slots=1, most=13)
    ticket = await it.enter("first", it.deadline())
    alone = await waiting(it, *["greedy"] * 20)
    refused = [task for task in alone if task.done()]
    assert all(isinstance(task.exception(), OverloadedError) for task in refused)
    assert it.waiting == 6
    modest = await waiting(it, *["modest"] * 20)
    assert sum(not task.done() for task in modest) == 3
    for task in alone + modest:
        task.cancel()
    await settle()
    ticket.release()
    assert (it.running, it.waiting) == (0, 0)


async def test_nothing_is_taken_where_nothing_may_be() -> None:
    it = admission(slots=4, most=0)
    with pytest.raises(OverloadedError):
        await it.enter("a", it.deadline())


async def test_the_estimate_follows_recent_requests() -> None:
    it = admission(slots=1, most=100)
    assert it.retry_after_s() == 1
    ticket = await it.enter("a", it.deadline())
    ticket.began -= 30
    tasks = await waiting(it, "a", "a", "a")
    ticket.release()
    assert 80 <= it.retry_after_s() <= 100, "two wait, and 30 s each"
    for task in tasks:
        task.cancel()


async def test_completions_of_one_prompt_take_places() -> None:
    it = admission(slots=1, most=9)
    ticket = await it.enter("a", it.deadline())
    before = current_ticket.set(ticket)
    try:
        async with it.working(None, 5):
            with pytest.raises(OverloadedError):
                it.check_room("a")
            it.check_room("b")
        it.check_room("a")
        with pytest.raises(OverloadedError):
            async with it.working(None, 6):
                pass
        with pytest.raises(OmniClientError) as caught:
            async with it.working(None, 100):
                pass
        assert caught.value.param == "n"
    finally:
        current_ticket.reset(before)
    it.check_room("a", 4)
    ticket.release()
    async with it.working(None, 100):  # from Python, which has no others to be fair to
        assert it.running == 1
    assert it.running == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("erct")), max_size=40),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_no_slot_is_ever_lost(steps: list[tuple[str, str]], slots: int, most: int) -> None:
    """Whoever enters, leaves, gives up or times out, in any order."""

    async def run() -> None:
        it = admission(slots, most)
        tasks: list[asyncio.Task[Ticket]] = []
        for client, step in steps:
            if step == "e":
                tasks.append(asyncio.create_task(it.enter(client, it.deadline())))
            elif step == "t":
                tasks.append(asyncio.create_task(it.enter(client, it.deadline(0))))
            elif step == "c" and (undecided := [t for t in tasks if not t.done()]):
                tasks.remove(undecided[0])
                undecided[0].cancel()  # it may have got its turn in this very step
            elif entered := [t for t in tasks if t.done() and t.exception() is None]:
                tasks.remove(entered[0])
                entered[0].result().release()
            if client == "a":
                await asyncio.sleep(0)
            assert it.running <= slots
            assert it.running + it.waiting <= most
        for _ in range(len(steps) + 1):
            await settle()
            for task in [t for t in tasks if t.done()]:
                tasks.remove(task)
                if task.exception() is None:
                    task.result().release()
        assert (it.running, it.waiting, tasks) == (0, 0, [])

    asyncio.run(run())


# As the door of an application.

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Client:
    """One request to an application, sent and taken by hand."""

    def __init__(
        self,
        app: App,
        host: str = "1.2.3.4",
        path: str = CHAT,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.takes = asyncio.Event()
        self.takes.set()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": list(headers),
            "client": (host, 1),
        }
        self.task = asyncio.ensure_future(app(scope, self.inbox.get, self._send))

    async def _send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message)

    def body(self, data: bytes = b"x", more: bool = False) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {key.decode(): value.decode() for key, value in self.sent[0]["headers"]}


class Echo:
    """An application that waits for the word and gives back what it got."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.inside: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside.append(current_client.get())
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    yield Echo()


def door(app: App, it: Admission) -> AdmissionMiddleware:
    return AdmissionMiddleware(app, it, keyed=False)


async def finished(*clients: Client) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(client.task for client in clients))


async def test_who_waits_is_not_read_and_who_finds_no_place_hears_when_to_come(echo: Echo) -> None:
    it = admission(slots=1, most=2)
    app = door(echo, it)
    first, second = Client(app, "a"), Client(app, "b")
    await settle()
    third = Client(app, "c")
    await finished(third)
    assert third.status == 429
    assert int(third.headers["retry-after"]) >= 1
    assert b'"type":"RateLimitError"' in third.sent[1]["body"]
    assert echo.inside == ["a"]
    for part in range(3):
        first.body(b"1")
        second.body(b"2", more=part < 2)
    await settle()
    assert second.inbox.qsize() == 2, "only the beginning of a body is read at the door"
    health = Client(app, "d", "/health", "GET")
    health.body(b"h")
    echo.go.set()
    await finished(first, second, health)
    assert [client.sent[1]["body"] for client in (first, second, health)] == [b"1", b"222", b"h"]
    assert (it.running, it.waiting) == (0, 0)


async def test_what_is_only_put_down_does_not_wait(echo: Echo) -> None:
    """A video is asked for at once; it is the video that waits, in a place of its client's."""
    it = admission(slots=1, most=4)
    app = door(echo, it)
    running = Client(app, "a")
    videos = [Client(app, "b", "/v1/videos") for _ in range(3)]
    await settle()
    assert echo.inside == ["a", "b", "b"]
    await finished(videos[2])
    assert videos[2].status == 429
    for client in (running, *videos[:2]):
        client.body()
    echo.go.set()
    await finished(running, *videos[:2])
    assert [client.status for client in videos[:2]] == [200, 200]
    idle = Client(door(echo, admission(slots=1, most=1)), "c", "/v1/videos")
    idle.body()
    await finished(idle)
    assert idle.status == 200, "on a server without waiting places too"
    assert (it.running, it.waiting) == (0, 0)
    assert it.check_room("a") is None


async def test_who_leaves_while_waiting_gives_its_place_back(echo: Echo) -> None:
    it = admission(slots=1, most=2)
    app = door(echo, it)
    first, second = Client(app, "a"), Client(app, "b")
    await settle()
    second.body()
    second.leave()
    await finished(second)
    assert second.sent == []
    assert it.waiting == 0
    third = Client(app, "c")
    await settle()
    assert it.waiting == 1
    first.body()
    third.body()
    echo.go.set()
    await finished(first, third)
    assert echo.inside == ["a", "c"]


async def test_who_waits_too_long_hears_of_it(echo: Echo) -> None:
    it = admission(slots=1, most=2, request_timeout=0.1)
    app = door(echo, it)
    first, second = Client(app, "a"), Client(app, "b")
    await finished(second)
    assert second.status == 504
    assert b'"type":"GatewayTimeoutError"' in second.sent[1]["body"]
    first.body()
    echo.go.set()
    await finished(first)
    assert first.status == 200


async def test_a_body_that_does_not_come_is_not_waited_for(echo: Echo) -> None:
    it = admission(slots=1, most=2, slow_client_timeout=0.1)
    client = Client(door(echo, it), "a")
    client.body(more=True)
    with pytest.raises(HTTPException) as caught:
        await finished(client)
    assert caught.value.status_code == 408
    assert it.running == 0


async def test_the_wait_at_the_door_is_no_slowness_of_the_client(echo: Echo) -> None:
    it = admission(slots=1, most=2, slow_client_timeout=0.1)
    app = door(echo, it)
    first, second = Client(app, "a"), Client(app, "b")
    first.body()
    second.body(b"1", more=True)
    await asyncio.sleep(0.3)
    echo.go.set()
    await finished(first)
    await settle()
    second.body(b"2")
    await finished(second)
    assert second.sent[1]["body"] == b"12"


async def test_who_waits_with_too_large_a_body_hears_of_it_inside(echo: Echo) -> None:
    it = admission(slots=1, most=2)
    app = BodyLimitMiddleware(door(echo, it), max_bytes=2)
    first, second = Client(app, "a"), Client(app, "b", headers=[(b"content-length", b"9")])
    first.body()
    await settle()
    assert not second.task.done()
    echo.go.set()
    await finished(first)
    with pytest.raises(HTTPException) as caught:
        await finished(second)
    assert caught.value.status_code == 413
    assert (it.running, it.waiting) == (0, 0)


async def test_a_body_that_trickles_is_not_waited_for(echo: Echo) -> None:
    it = admission(slots=1, most=2, slow_client_timeout=0.2)
    client = Client(door(echo, it), "a")

    async def trickle() -> None:
        while True:
            client.body(more=True)
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    with pytest.raises(HTTPException):
        await finished(client)
    trickling.cancel()


async def test_an_answer_that_nobody_takes_is_given_up(echo: Echo) -> None:
    it = admission(slots=1, most=2, slow_client_timeout=0.1)
    client = Client(door(echo, it), "a")
    client.takes.clear()
    client.body()
    echo.go.set()
    await finished(client)
    assert client.sent == []
    assert it.running == 0


async def test_the_engine_works_within_its_requests_ticket() -> None:
    """One slot for a request however often it calls the engine, one after the other; what it runs
    beside that takes places."""
    it = admission(slots=1, most=4)
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            async with it.working(None) as ticket:
                seen.append((ticket.turn, it.running))
        async with it.working(None), it.working(None) as second, it.working(None):
            seen.append((second.turn, it.running))
            with pytest.raises(OverloadedError):
                async with it.working(None):
                    pass

    client = Client(door(app, it), "a")
    await finished(client)
    assert seen == [(True, 1), (True, 1), (False, 1)]
    assert it.running == 0


async def test_a_ticket_lasts_as_long_as_the_engine_works() -> None:
    """Work in the background of a request that has been answered still counts."""
    it = admission(slots=1, most=4)
    end = asyncio.Event()
    background: list[asyncio.Task[None]] = []

    async def work() -> None:
        async with it.working(None):
            await end.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        background.append(asyncio.create_task(work()))
        await settle()

    await finished(Client(door(app, it), "a"))
    assert it.running == 1
    end.set()
    await background[0]
    assert it.running == 0


@pytest.mark.parametrize(
    ("first", "second", "keyed", "same"),
    [
        (("1.1.1.1", "k1"), ("1.1.1.1", "k2"), True, False),
        (("1.1.1.1", "k1"), ("2.2.2.2", "k1"), True, True),
        (("1.1.1.1", "k1"), ("1.1.1.1", "k2"), False, True),
        (("1.1.1.1", None), ("2.2.2.2", None), True, False),
        (("2001:db8::1", None), ("2001:db8::2", None), False, True),
        (("2001:db8::1", None), ("2001:db8:0:1::1", None), False, False),
        (("fe80::1%eth0", None), ("fe80::2%eth0", None), False, True),
    ],
)
def test_client_of(
    first: tuple[str, str | None], second: tuple[str, str | None], keyed: bool, same: bool
) -> None:
    def name(host: str, key: str | None) -> str:
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        return client_of({"type": "http", "headers": headers, "client": (host, 1)}, keyed)

    assert (name(*first) == name(*second)) == same
    assert "k1" not in name(*first).split(":"), "a key is never kept"


def test_a_unix_socket_has_one_client() -> None:
    assert client_of({"type": "http", "headers": [], "client": None}, False) == "socket"


async def test_a_deadline_is_never_beyond_the_servers() -> None:
    it = admission(slots=1, most=2, request_timeout=10)
    now = asyncio.get_running_loop().time()
    assert 9 < it.deadline(99) - now < 11
    assert it.deadline(1) - now < 2
    with pytest.raises(DeadlineExceededError):
        ticket = await it.enter("a", it.deadline())
        try:
            await it.enter("a", it.deadline(0))
        finally:
            ticket.release()
