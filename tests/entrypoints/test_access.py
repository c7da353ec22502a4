# SPDX-License-Identifier: Apache-2.0
"""API keys on every route and WebSocket, headers of every response (DESIGN.md section 9)."""

from argparse import Namespace
from typing import Any

import pytest
import regex as re
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import WebSocketDenialResponse
from starlette.types import ASGIApp

from vllm_omni.config.limits import ServingLimits
from vllm_omni.entrypoints.admission import Admission
from vllm_omni.entrypoints.openai.app import add_middleware
from vllm_omni.entrypoints.openai.error_handlers import install_error_handlers
from vllm_omni.entrypoints.openai.headers import SecurityHeadersMiddleware
from vllm_omni.entrypoints.openai.middleware import RequestIdMiddleware

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

KEYS = ["first", "schlüssel"]
GUARDED = ("/metrics", "/version", "/v1/x", "/health/", "/healthz", "/nowhere")


def client(root_path: str = "", **flags: Any) -> TestClient:
    """An application behind our middleware, as `build_omni_app` puts it."""
    args = {
        "api_key": KEYS,
        "open_metrics": False,
        "disable_playground": False,
        "allowed_origins": [],
        "max_body_bytes": 100,
        "max_media_per_request": 1,
        **flags,
    }
    app = FastAPI(root_path=root_path)
    install_error_handlers(app)
    for path in ("/health", "/metrics", "/version", "/v1/x"):
        app.get(path)(lambda: "yes")

    @app.get("/broken")
    def broken() -> None:
        raise RuntimeError("/srv/secret/place.py")

    @app.websocket("/v1/realtime")
    async def talk(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("yes")
        await socket.close()

    app.add_middleware(CORSMiddleware, allow_origins=args["allowed_origins"])
    add_middleware(app, Namespace(**args), Admission(4, ServingLimits()))
    return TestClient(app, raise_server_exceptions=False)


def bearer(key: str) -> dict[str, Any]:
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize("path", GUARDED)
def test_every_route_wants_a_key(path: str) -> None:
    server = client()
    for headers in (
        {},
        bearer("wrong"),
        bearer(""),
        bearer("first "),
        {"Authorization": "first"},
        {"Authorization": "Basic first"},
        {"X-Api-Key": "first"},
    ):
        reply = server.get(path, headers=headers)
        assert reply.status_code == 401, headers
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert server.options(path, headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_will_do(key: str) -> None:
    server = client()
    assert server.get("/version", headers=bearer(key)).status_code == 200
    assert server.get("/version", headers={"authorization": f"bearer {key}".encode()}).is_success


def test_what_is_open() -> None:
    assert client().get("/health").is_success
    assert client(open_metrics=True).get("/metrics").is_success
    assert client("/behind", open_metrics=True).get("/behind/metrics").is_success
    assert client("/behind").get("/behind/version").status_code == 401
    assert client(api_key=None).get("/version").is_success


def test_the_variable_is_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    assert client(api_key=None).get("/version").status_code == 401
    assert client(api_key=None).get("/version", headers=bearer("of the environment")).is_success


def opens(server: TestClient, **headers: Any) -> int:
    """101, or the status with which a WebSocket is refused."""
    try:
        with server.websocket_connect("/v1/realtime", headers=headers) as socket:
            assert socket.receive_text() == "yes"
    except WebSocketDenialResponse as refusal:
        return refusal.status_code
    return 101


def test_websockets_want_a_key_and_no_foreign_page() -> None:
    server, key = client(), bearer("first")
    assert opens(server) == opens(server, **bearer("wrong")) == 401
    assert opens(server, **key) == opens(server, **key, Origin="http://testserver") == 101
    assert opens(server, **key, Origin="https://evil.example") == 403
    assert opens(server, **key, Origin="null") == 403
    assert opens(client(api_key=None), Origin="https://evil.example") == 403
    friendly = client(allowed_origins=["https://app.example"])
    assert opens(friendly, **key, Origin="https://app.example") == 101


def test_pages_of_other_sites_get_nothing_unless_named() -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert client().options("/v1/x", headers=ask).status_code == 400
    reply = client().get("/health", headers={"Origin": "https://app.example"})
    assert "access-control-allow-origin" not in reply.headers
    friendly = client(allowed_origins=["https://app.example"])
    reply = friendly.options("/v1/x", headers=ask)
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert friendly.get("/v1/x").status_code == 401


@pytest.mark.parametrize("path", ["/health", "/version", "/nowhere", "/broken"])
@pytest.mark.parametrize("key", ["first", "wrong"])
def test_every_response_has_its_headers(path: str, key: str) -> None:
    server = client()
    reply = server.get(path, headers={**bearer(key), "X-Request-Id": "mine-1"})
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers.get_list("x-request-id") == ["mine-1"]
    assert "server" not in reply.headers
    if reply.status_code == 500:
        assert "mine-1" in reply.text
        assert "secret" not in reply.text


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", "é"])
def test_odd_request_ids_are_cleaned(given: str) -> None:
    reply = client().get("/health", headers={"X-Request-Id": given.encode()})
    (request_id,) = reply.headers.get_list("x-request-id")
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", request_id)


def test_a_route_sees_the_id_that_the_client_gets() -> None:
    seen: list[str] = []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(value.decode() for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app: ASGIApp = RequestIdMiddleware(SecurityHeadersMiddleware(route))
    reply = TestClient(app).get("/")
    assert seen == [reply.headers["x-request-id"]]
