# SPDX-License-Identifier: Apache-2.0
"""The door of the HTTP server: requests that cost something wait here, before their body is read.

So what waits is a connection and its headers, and what a server holds is bounded by the number of
requests that it works on. A client that neither sends nor takes anything is let go.
"""

import asyncio
import hashlib
import ipaddress
from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from vllm_omni.entrypoints.admission import (
    Admission,
    Ticket,
    current_client,
    current_ticket,
)
from vllm_omni.entrypoints.openai.error_handlers import omni_error_body
from vllm_omni.errors import OmniError, http_status

logger = init_logger(__name__)

WORK = (
    *("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/tokenize", "/detokenize"),
    *("/classify", "/generative_scoring", "/pooling", "/rerank", "/score"),
)
"""Paths whose POST requests wait; all others are about the server itself."""
ADMINISTRATION = ("/cancel", "/load_lora_adapter", "/unload_lora_adapter")
"""Ends of paths under `WORK` that must get through whatever the load."""
BACKGROUND = ("/v1/videos",)
"""Paths under `WORK` whose POST only says what to do: the work waits for its turn by itself, and
the request takes a waiting place while its body is read."""
SLOWEST_BODY = 64 * 1024
"""Bytes per second that a body may come at, on average."""


class _ClientStalled(Exception):
    """The client takes nothing. Not an error that is answered: nobody listens."""


class _ClientGone(Exception):
    """The client left before its turn came."""


class AdmissionMiddleware:
    """Lets requests in by `Admission`.

    It belongs behind authentication, so that only who may come at all takes a place.

    Args:
        app: The next ASGI application.
        admission: Shared with the engine client.
        keyed: Clients have API keys, which tell them apart; else their addresses do.
    """

    def __init__(self, app: ASGIApp, admission: Admission, keyed: bool) -> None:
        self.app = app
        self._admission = admission
        self._keyed = keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        client = client_of(scope, self._keyed)
        current_client.set(client)
        if not _is_work(scope):
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, self._admission)
        try:
            if _path(scope) in BACKGROUND:
                ticket = self._admission.take_place(client)
            else:
                ticket = await self._let_in(client, exchange)
        except OmniError as error:
            response = JSONResponse(omni_error_body(error), http_status(error))
            await response(scope, receive, exchange.send)
            return
        except _ClientGone:
            return
        current_ticket.set(ticket)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except _ClientStalled:
            self._admission.metrics.slow_client()
            logger.info("%s: given up, for its client takes nothing", scope["path"])
        finally:
            ticket.release()

    async def _let_in(self, client: str, exchange: "_Exchange") -> Ticket:
        deadline = self._admission.deadline()
        ticket = self._admission.try_enter(client, deadline)
        if ticket is not None:
            return ticket
        self._admission.check_room(client)
        entering = asyncio.create_task(self._admission.enter(client, deadline))
        leaving = asyncio.create_task(exchange.disconnected())
        try:
            await asyncio.wait((entering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if entering.done():
                return entering.result()
            raise _ClientGone
        finally:
            entering.cancel()
            leaving.cancel()


class _Exchange:
    """One request and its response, each side of it in bounded time."""

    def __init__(self, receive: Receive, send: Send, admission: Admission) -> None:
        self._receive = receive
        self._send = send
        self._admission = admission
        self._patience_s = admission.limits.slow_client_timeout
        self._began: float | None = None
        self._received = 0
        self._body_came = False
        self._early: Message | None = None
        self._refused: HTTPException | None = None

    async def disconnected(self) -> None:
        """Return if the client leaves. Of a long body only the beginning is read, and then its
        leaving is not noticed."""
        try:
            self._early = await self._receive()
        except HTTPException as error:  # the body is too large: for the route to answer
            self._refused = error
        if self._early is None or self._early.get("more_body", False):
            await asyncio.Event().wait()
        assert self._early is not None
        while self._early["type"] != "http.disconnect" and (
            (await self._receive())["type"] != "http.disconnect"
        ):
            pass

    async def receive(self) -> Message:
        """ASGI's, with a limit on the time that a body takes.

        Raises:
            HTTPException: It took longer; routes pass on errors of this class alone.
        """
        if self._refused is not None:
            raise self._refused
        if self._body_came:
            return await self._receive()
        if self._early is not None:
            message, self._early = self._early, None
        else:
            message = await self._next_part()
        self._received += len(message.get("body", b""))
        self._body_came = not message.get("more_body", False)
        return message

    async def _next_part(self) -> Message:
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        whole = self._began + self._patience_s + self._received / SLOWEST_BODY
        try:
            async with asyncio.timeout_at(min(whole, now + self._patience_s)):
                return await self._receive()
        except TimeoutError:
            self._admission.metrics.slow_client()
            raise HTTPException(
                HTTPStatus.REQUEST_TIMEOUT,
                "The request body came too slowly (--slow-client-timeout).",
                headers={"Connection": "close"},
            ) from None

    async def send(self, message: Message) -> None:
        """ASGI's, with a limit on the time that the client does not read."""
        if (
            message["type"] == "http.response.start"
            and message["status"] == HTTPStatus.TOO_MANY_REQUESTS
        ):
            headers = MutableHeaders(scope=message)
            headers.setdefault("Retry-After", str(self._admission.retry_after_s()))
        try:
            async with asyncio.timeout(self._patience_s):
                await self._send(message)
        except TimeoutError:
            raise _ClientStalled from None


def client_of(scope: Scope, keyed: bool) -> str:
    """A name for whoever sent a request: a digest of its API key, or the address.

    Args:
        scope: ASGI's.
        keyed: Whether API keys are checked. If not, a client could call itself anything.
    """
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    if keyed and scheme.lower() == "bearer":
        return "key:" + hashlib.sha256(key.encode()).hexdigest()[:16]
    if not scope.get("client"):
        return "socket"
    host = scope["client"][0]
    if ":" not in host:
        return str(host)
    # One customer has a whole /64 of IPv6.
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


def _is_work(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path = _path(scope)
    return path.startswith(WORK) and not path.endswith(ADMINISTRATION)


def _path(scope: Scope) -> str:
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
