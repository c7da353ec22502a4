# SPDX-License-Identifier: Apache-2.0
"""Requests made from the OpenAPI document of a server that generates or speaks."""

import os
from typing import Any, Protocol

import hypothesis
import schemathesis
from requests.exceptions import InvalidHeader, InvalidURL
from schemathesis.generation import GenerationMode

from tests.entrypoints.generation import KEY, MODEL, SIZE

CASES = int(os.environ.get("VLLM_OMNI_FUZZ_CASES", "60"))
"""Of all routes of one server together; CI has few."""
_BOUNDED = {"num_inference_steps": 1, "size": SIZE, "n": 1, "num_frames": 1, "fps": 8}
_UNBOUNDED = ("width", "height", "seconds", "aspect_ratio", "short_edge")
_HEADERS = {"Authorization": f"Bearer {KEY}"}


class Server(Protocol):
    """A running server."""

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        ...


def fuzz(server: Server, prefixes: tuple[str, ...]) -> list[str]:
    """Call every operation below these paths; what must not be answered, and what never was."""
    url = f"{server.url}/openapi.json"
    schema = schemathesis.openapi.from_url(url, headers=_HEADERS)
    schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    operations = [
        operation
        for operation in (result.ok() for result in schema.get_all_operations())
        if operation.path.startswith(prefixes)
    ]
    failed = [] if operations else ["the document has none of these paths"]
    for operation in operations:
        _fuzz(server.url, operation, max(1, CASES // len(operations)), failed)
    return failed


def _fuzz(url: str, operation: Any, examples: int, failed: list[str]) -> None:
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
            reply = case.call(base_url=url, headers=_HEADERS, timeout=120)
        except (InvalidHeader, InvalidURL, UnicodeError):
            return  # no HTTP client can send that
        if reply.status_code < 400:
            return
        told = f"{operation.label}: {reply.status_code} {reply.text[:300]}"
        if reply.status_code >= 500:
            failed.append(f"{told} to {str(case.body)[:300]} {case.query}")
        elif not reply.json()["error"]["message"]:
            failed.append(told)

    run()


def _bounded(body: dict[str, Any]) -> dict[str, Any]:
    """The same, but soon done."""
    rest = {name: value for name, value in body.items() if name not in _UNBOUNDED}
    known = {"model": MODEL} if isinstance(body.get("model"), str) else {}
    return {**rest, **known, **_BOUNDED}
