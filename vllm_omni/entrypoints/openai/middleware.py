# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware of the HTTP server."""

from http import HTTPStatus

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.logs import clean_request_id, set_request_id

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


REQUEST_ID_HEADER = "x-request-id"
_STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class RequestIdMiddleware:
    """Give every request an id that is safe to log: the client's `X-Request-Id`, or a new one.

    Whatever is behind sees the clean id in the header; the client gets it back in the response.

    Args:
        app: The next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        request_id = clean_request_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        # In the one scope that all layers share: the handler of last resort is outside of this.
        MutableHeaders(scope=scope)[REQUEST_ID_HEADER] = request_id
        set_request_id(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers[REQUEST_ID_HEADER] = request_id
                message["headers"] = headers.raw
            await send(message)

        await self.app(scope, receive, send_with_id)
