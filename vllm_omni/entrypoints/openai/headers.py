# SPDX-License-Identifier: Apache-2.0
"""What every response carries: a request id, and headers that keep browsers from guessing."""

import uuid
from collections.abc import Mapping

import regex as re
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
SECURITY_HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ResponseHeadersMiddleware:
    """Adds the headers, and names each request.

    The name is the client's `X-Request-Id` if it is a plain word, else a new one; routes, logs and
    the response see the same.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        request_id = name_request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                add_headers(MutableHeaders(scope=message), request_id)
            await send(message)

        await self.app(scope, receive, send_with_headers)


def name_request(scope: Scope) -> str:
    """Give the request a name, in its own headers, and return it."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    if _ACCEPTABLE_ID.fullmatch(given):
        return given
    request_id = uuid.uuid4().hex
    others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID.encode()]
    scope["headers"] = [*others, (REQUEST_ID.encode(), request_id.encode())]
    return request_id


def add_headers(headers: MutableHeaders, request_id: str) -> None:
    """Add what a response lacks."""
    for name, value in {**SECURITY_HEADERS, REQUEST_ID: request_id}.items():
        headers.setdefault(name, value)
