# SPDX-License-Identifier: Apache-2.0
"""A server with keys: every route it has asks for one, and its log tells no secret."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.bad_requests import said
from tests.entrypoints.conftest import MODEL, SERVE_FLAGS, THREADS, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

KEYS = ("key-canary-1", "key-canary-2")
TOKENS = ("hf_canary_flag", "hf_canary_variable")
PRIVATE = ("prompt-canary", "signature-canary", "password-canary")


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("guarded") / "log.txt"
    flags = (*SERVE_FLAGS, "--api-key", *KEYS, "--hf-token", TOKENS[0])
    env = {**THREADS, "HF_TOKEN": TOKENS[1], "VLLM_LOGGING_LEVEL": "INFO"}  # as users have it
    live = LiveServer(checkpoint, flags, log=log, env=env)
    live.start()
    yield live
    live.stop_cleanly()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_asks_for_a_key(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        document = http.get("/openapi.json", headers=bearer(KEYS[1])).json()
        paths = {*document["paths"], "/metrics", "/docs", "/openapi.json", "/nowhere", "/v1/models"}
        assert len(paths) > 15
        for path in paths - {"/health"}:
            for method in ("GET", "POST", "OPTIONS"):
                reply = http.request(method, path, headers=bearer("wrong"))
                assert reply.status_code == 401, (method, path)
        assert http.get("/health").status_code == 200
        for key in KEYS:
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200


def test_the_log_tells_no_secret(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, headers=bearer(KEYS[0]), timeout=60) as http:
        for text, url in (
            (PRIVATE[0], None),
            ("see", f"http://user:{PRIVATE[2]}@127.0.0.1/x.png?sig={PRIVATE[1]}"),
            ("see", f"http://host.invalid/x.png?sig={PRIVATE[1]}"),
        ):
            parts = [{"type": "text", "text": text}]
            if url:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            body = {"model": MODEL, "messages": said(*parts), "max_tokens": 2}
            reply = http.post("/v1/chat/completions", json=body)
            assert reply.status_code == (422 if url else 200), reply.text
            assert not any(secret in reply.text for secret in (*KEYS, *TOKENS, *PRIVATE[1:]))
        http.get("/v1/models", headers=bearer("wrong-canary"))
    log = guarded.log.read_text(errors="replace")
    assert "/v1/chat/completions" in log
    assert "hf_token=***" in log
    for secret in (*KEYS, *TOKENS, *PRIVATE, "wrong-canary"):
        assert secret not in log
