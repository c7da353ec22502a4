# SPDX-License-Identifier: Apache-2.0
"""Small parts of the HTTP server on their own."""

import errno
import time
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from vllm_omni.entrypoints.openai.app import include_first
from vllm_omni.entrypoints.openai.error_handlers import field_named_in, install_error_handlers
from vllm_omni.entrypoints.openai.middleware import BodyLimitMiddleware
from vllm_omni.entrypoints.openai.spoken import SpokenTexts
from vllm_omni.errors import OmniClientError, OmniGenerateError, StageUnavailableError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("top_k must be 0 (disable), or at least 1, got -5.", "top_k"),
        ("n must be at least 1, got 0.", "n"),
        ("continue_final_message and add_generation_prompt are ...", "continue_final_message"),
        ("user must be nice", "user"),
        ("The decoder prompt cannot be empty", None),
        ("stop and think", None),
    ],
)
def test_field_named_in(message: str, field: str | None) -> None:
    assert field_named_in(message) == field


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (OmniClientError("no", 422, "Odd", param="x.y", code="z"), 422, "Odd"),
        (StageUnavailableError("busy"), 503, "ServiceUnavailableError"),
        (OmniGenerateError("broke"), 500, "InternalServerError"),
        (RuntimeError("/secret/path"), 500, "InternalServerError"),
        (OSError(errno.ENOSPC, "full", "/secret/path"), 507, "InsufficientStorageError"),
        (OSError(errno.EIO, "broken", "/secret/path"), 500, "InternalServerError"),
    ],
)
def test_errors_keep_status_and_type(error: Exception, status: int, kind: str) -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    def fail() -> None:
        raise error

    reply = TestClient(app, raise_server_exceptions=False).get("/")
    assert reply.status_code == status
    body = reply.json()["error"]
    assert body["type"] == kind
    assert "secret" not in body["message"]
    if isinstance(error, OmniClientError):
        assert (body["param"], body["code"]) == ("x.y", "z")


def test_body_limit_counts_what_comes() -> None:
    app = FastAPI()
    install_error_handlers(app)
    app.add_middleware(BodyLimitMiddleware, max_bytes=100)

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    client = TestClient(app)
    assert client.post("/", content=b"x" * 100).json() == 100
    assert client.post("/", content=b"x" * 101).status_code == 413
    assert client.post("/", content=iter([b"x" * 60] * 2)).status_code == 413
    assert client.post("/", content=iter([b"x" * 50] * 2)).json() == 100


def test_our_routes_win_and_are_documented() -> None:
    app, ours = FastAPI(), FastAPI()
    app.get("/a", name="theirs")(lambda: "theirs")
    app.get("/b")(lambda: "b")
    ours.get("/a", name="ours", summary="Ours")(lambda: "ours")
    include_first(app, [ours.router])
    client = TestClient(app)
    assert client.get("/a").json() == "ours"
    assert client.get("/b").json() == "b"
    assert app.openapi()["paths"]["/a"]["get"]["summary"] == "Ours"
    assert "theirs" in [route.name for route in app.routes if hasattr(route, "name")]


def test_spoken_texts_expire_and_are_bounded() -> None:
    texts = SpokenTexts(limit=2)
    now = int(time.time())
    for name, until in (("a", now + 9), ("b", now - 9), ("c", now + 9)):
        texts.remember(name, until, name.upper())
    for gone in ("a", "b"):
        with pytest.raises(OmniClientError) as caught:
            texts.fill_in([{"role": "assistant", "audio": {"id": gone}}])
        assert caught.value.param == "messages.0.audio.id"
    messages: list[Any] = [
        {"role": "assistant", "audio": {"id": "c"}},
        {"role": "assistant", "audio": {"id": "a"}, "content": "kept"},
    ]
    texts.fill_in(messages)
    assert [message["content"] for message in messages] == ["C", "kept"]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Input length (9) exceeds model's maximum context length (8).", "Input length"),
        ("Video doesn't have audio track with `audio_in_video=True`", "audio track"),
        (
            "Failed to apply Processor on data={'audio': [array([0.])]}",
            "cannot take",
        ),
    ],
)
def test_refusals_of_media_name_the_messages_and_show_no_data(message: str, says: str) -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    def fail() -> None:
        raise ValueError(message)

    reply = TestClient(app).get("/")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages")
    assert says in error["message"]
    assert "array(" not in error["message"]
