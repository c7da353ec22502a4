# SPDX-License-Identifier: Apache-2.0
"""Headers of every response that keep browsers from guessing and embedding."""

from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class SecurityHeadersMiddleware:
    """Adds the headers that a response lacks.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                add_security_headers(MutableHeaders(scope=message))
            await send(message)

        await self.app(scope, receive, send_with_headers)


def add_security_headers(headers: MutableHeaders) -> None:
    """Add what a response lacks."""
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)
