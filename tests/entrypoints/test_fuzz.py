# SPDX-License-Identifier: Apache-2.0
"""Whatever fits the OpenAPI document of the chat route, and what just does not: never a 5xx."""

import json
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode

from tests.entrypoints.conftest import MODEL, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

EXAMPLES = 60
_SHORT = {"max_tokens": 4, "max_completion_tokens": 4}


def test_chat_never_fails_on_the_servers_side(server: LiveServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    operation = schema["/v1/chat/completions"]["POST"]
    seen: set[int] = set()

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: Any) -> None:
        body = _bounded(case.body)
        reply = httpx.post(
            f"{server.url}/v1/chat/completions",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={"content-type": "application/json"},
            timeout=60,
        )
        seen.add(reply.status_code)
        assert reply.status_code < 500, (reply.text, body)
        if reply.status_code >= 400:
            assert reply.json()["error"]["message"], body

    run()
    assert 400 in seen
    server.assert_answers()


def _bounded(body: Any) -> Any:
    """Most generated bodies name no model of ours, which would end them early."""
    if not isinstance(body, dict):
        return body if isinstance(body, bytes) else (body or {})
    known = {"model": MODEL} if isinstance(body.get("model"), str) else {}
    return {**body, **known, **_SHORT}
