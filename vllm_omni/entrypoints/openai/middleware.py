# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of the HTTP server."""

from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_MAX_BODY_BYTES = 256 * 1024 * 1024


class BodyLimitMiddleware:
    """Refuse request bodies over a limit with 413, before they fill the memory.

    A declared length is refused when the route starts to read, a chunked body when it passes the
    limit. The error is raised into the route, so it is answered in the shape of all others.

    Args:
        app: The next ASGI application.
        max_bytes: The limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        received = int(declared) if declared.isdigit() else 0
        counted = declared.isdigit()

        async def limited_receive() -> Message:
            nonlocal received
            if received <= self.max_bytes:
                message = await receive()
                if not counted:
                    received += len(message.get("body", b""))
                if received <= self.max_bytes:
                    return message
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The request body is over the limit of {self.max_bytes} bytes (--max-body-bytes).",
                headers={"Connection": "close"},
            )

        await self.app(scope, limited_receive, send)
