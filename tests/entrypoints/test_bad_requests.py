# SPDX-License-Identifier: Apache-2.0
"""Whatever a client does wrong is told in OpenAI's shape, and the server goes on."""

from collections.abc import Iterator

import httpx
import pytest

from tests.entrypoints.bad_requests import ALL, BATCH, HI, Bad, image, whole
from tests.entrypoints.conftest import MAX_BODY_BYTES, MODEL, LiveServer
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.assert_answers()


def error_of(reply: httpx.Response) -> dict[str, object]:
    """The error object, which must be OpenAI's."""
    body = reply.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"] and body["error"]["type"]
    return body["error"]


@pytest.mark.parametrize("bad", ALL.values(), ids=ALL.keys())
def test_bad_request(http: httpx.Client, bad: Bad) -> None:
    reply = http.post("/v1/chat/completions", content=whole(bad.body), headers=JSON)
    assert reply.status_code == bad.status, reply.text
    error = error_of(reply)
    assert error["param"] == bad.param, error
    assert bad.says in error["message"]
    assert "0x" not in error["message"] and "Traceback" not in error["message"]
    assert "array(" not in error["message"] and "<PIL" not in error["message"]
    assert reply.headers["x-request-id"] and reply.headers["x-content-type-options"] == "nosniff"
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("bad", BATCH.values(), ids=BATCH.keys())
def test_bad_batch(http: httpx.Client, bad: Bad) -> None:
    """What a batch cannot give is refused, not left out."""
    reply = http.post("/v1/chat/completions/batch", content=whole(bad.body), headers=JSON)
    assert reply.status_code == bad.status, reply.text
    error = error_of(reply)
    assert error["param"] == bad.param, error
    assert bad.says in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "hi", "vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs."),
        ("responses", {"input": "hi", "vllm_xargs": {"kv_transfer_params": 1}}, "vllm_xargs."),
        ("completions", {"prompt": "hi", "structured_outputs": {"regex": r"[^\s\S]"}}, "struct"),
    ],
)
def test_bad_request_of_vllms_own_routes(
    http: httpx.Client, path: str, body: dict[str, object], param: str
) -> None:
    reply = http.post(f"/v1/{path}", json={"model": MODEL, **body})
    assert reply.status_code == 400, reply.text
    assert str(error_of(reply)["param"]).startswith(param), reply.text
    assert http.get("/health").status_code == 200


def test_a_batch_of_texts_is_served(http: httpx.Client) -> None:
    body = whole({"messages": [HI, HI], "modalities": ["text"], "temperature": 0})
    reply = http.post("/v1/chat/completions/batch", content=body, headers=JSON)
    assert reply.status_code == 200, reply.text
    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert len(texts) == 2 and texts[0] == texts[1]


@pytest.mark.parametrize("name", ["bias out of vocabulary", "unknown voice", "truncated image"])
def test_streams_that_never_start_have_the_status_too(http: httpx.Client, name: str) -> None:
    bad = ALL[name]
    assert isinstance(bad.body, dict)
    body = whole({**bad.body, "stream": True})
    reply = http.post("/v1/chat/completions", content=body, headers=JSON)
    assert reply.status_code == bad.status
    assert error_of(reply)["param"] == bad.param


def test_body_that_hides_its_size(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(2 + MAX_BODY_BYTES // 100_000):
            yield b" " * 100_000

    reply = http.post("/v1/chat/completions", content=chunks(), headers=JSON)
    assert reply.status_code == 413
    assert "--max-body-bytes" in str(error_of(reply)["message"])


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_wrong_content_type(http: httpx.Client, kind: str) -> None:
    reply = http.post("/v1/chat/completions", content=whole({}), headers={"content-type": kind})
    assert reply.status_code == 415
    error_of(reply)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("GET", "/v1/nothing", 404), ("PUT", "/health", 405)],
)
def test_unknown_routes(http: httpx.Client, method: str, path: str, status: int) -> None:
    reply = http.request(method, path)
    assert reply.status_code == status
    assert path in str(error_of(reply)["message"])


def test_a_picture_of_a_refused_request_is_served_later(http: httpx.Client) -> None:
    """The engine core never got it, whatever the front end keeps of processed media (B-12)."""
    picture = {"messages": image(media.encode_image(media.image(40, 24)))}
    refused = http.post(
        "/v1/chat/completions", content=whole(picture | {"max_tokens": 10**9}), headers=JSON
    )
    assert refused.status_code == 400, refused.text
    for _ in range(2):
        reply = http.post("/v1/chat/completions", content=whole(picture), headers=JSON)
        assert reply.status_code == 200, reply.text
