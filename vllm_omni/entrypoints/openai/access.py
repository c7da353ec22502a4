# SPDX-License-Identifier: Apache-2.0
"""Who may call the server: API keys on every route, and which web pages may open a WebSocket."""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.entrypoints.openai.error_handlers import error_body

HEALTH = "/health"
METRICS = "/metrics"
_PREFLIGHT = {"origin", "access-control-request-method"}


class ApiKeyMiddleware:
    """Ask for a key on every route and WebSocket but the open ones.

    vLLM's own middleware guards `/v1`, `/v2` and `/inference` alone. Keys are compared by digest
    and in constant time, all of them, so neither time nor order tells anything.

    Args:
        app: The next ASGI application.
        keys: Any of them will do, as `Authorization: Bearer KEY`.
        open_paths: Exact paths that need none.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Iterable[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_allowed(scope):
            await self.app(scope, receive, send)
            return
        body = error_body(
            "A valid API key is needed, as `Authorization: Bearer KEY`.",
            HTTPStatus.UNAUTHORIZED,
            "AuthenticationError",
            code="invalid_api_key",
        )
        reply = JSONResponse(body, HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
        await reply(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._open_paths:
            return True
        headers = Headers(scope=scope)
        if scope.get("method") == "OPTIONS" and set(headers) >= _PREFLIGHT:
            return True  # a preflight cannot carry a key; the CORS middleware answers it
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.encode("latin-1"))  # the bytes as they came
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class WebSocketOriginMiddleware:
    """Refuse WebSockets that pages of other sites open; CORS does not cover them.

    Clients that are no browsers send no `Origin` and are let through.

    Args:
        app: The next ASGI application.
        allowed_origins: Those of `--allowed-origins`; `*` is any.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self.app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" or self._is_allowed(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        message = "Pages of this origin may not open a WebSocket here (--allowed-origins)."
        body = error_body(message, HTTPStatus.FORBIDDEN, "PermissionDeniedError")
        await JSONResponse(body, HTTPStatus.FORBIDDEN)(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or self._allowed & {"*", origin}:
            return True
        return urlsplit(origin).netloc == headers.get("host")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
