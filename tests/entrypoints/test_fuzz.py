# SPDX-License-Identifier: Apache-2.0
"""Whatever fits the OpenAPI document, and what just does not: never a 5xx.

`VLLM_OMNI_FUZZ_CASES` says how many cases all routes together get; CI has few.
"""

import json
import os
from http import HTTPStatus
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from requests.exceptions import InvalidHeader, InvalidURL
from schemathesis.generation import GenerationMode

from tests.entrypoints.conftest import MODEL, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

EXAMPLES = 30
CASES = int(os.environ.get("VLLM_OMNI_FUZZ_CASES", "150"))
"""Of all routes together."""
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


@pytest.mark.timeout(300 + CASES)
def test_no_route_fails_on_the_servers_side(server: LiveServer) -> None:
    """Issue 3: schemathesis over the whole document; each answer is one that clients can read."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    operations = [result.ok() for result in schema.get_all_operations()]
    each = max(1, CASES // len(operations))
    failed: list[str] = []
    for operation in operations:
        _fuzz(server.url, operation, each, failed)
    assert failed == []
    server.assert_answers()


def _fuzz(url: str, operation: Any, examples: int, failed: list[str]) -> None:
    """Call an operation with generated arguments and bodies, and note what it must not answer."""

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = _bounded(case.body)
        try:
            reply = case.call(base_url=url, timeout=120)
        except (InvalidHeader, InvalidURL, UnicodeError):
            return  # no HTTP client can send that
        # 501 is vLLM's word for what this kind of model does not do.
        if reply.status_code >= 500 and reply.status_code != HTTPStatus.NOT_IMPLEMENTED:
            told = f"{reply.status_code} {reply.text[:300]}"
            failed.append(f"{operation.label}: {told} to {str(case.body)[:300]} {case.query}")

    run()


def _bounded(body: Any) -> Any:
    """Most generated bodies name no model of ours, which would end them early."""
    if not isinstance(body, dict):
        return body if isinstance(body, bytes) else (body or {})
    known = {"model": MODEL} if isinstance(body.get("model"), str) else {}
    return {**body, **known, **_SHORT}
