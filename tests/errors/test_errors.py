# SPDX-License-Identifier: Apache-2.0
"""A client's fault keeps its status and type over every hop (A-44)."""

import pytest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from vllm_omni.errors import (
    DeadlineExceededError,
    GuardrailViolationError,
    OmniClientError,
    OmniError,
    OverloadedError,
    SlowClientError,
    client_error_from_metadata,
    client_error_metadata,
    http_status,
    is_client_error_status,
    raise_client_error_or,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]


@pytest.mark.parametrize("status", [400, 403, 413, 422, 429, 499])
def test_a_client_error_survives_its_metadata(status: int) -> None:
    sent = OmniClientError("no", status, "SomeError")
    got = client_error_from_metadata(str(sent), *client_error_metadata(sent))
    assert got is not None
    assert (str(got), got.status_code, got.error_type) == ("no", status, "SomeError")
    assert http_status(got) == status
    with pytest.raises(OmniClientError, match="no"):
        raise_client_error_or(RuntimeError("server"), "no", status, "SomeError")


@pytest.mark.parametrize("status", [None, 399, 500, 503])
def test_anything_else_is_the_servers(status: int | None) -> None:
    assert not is_client_error_status(status)
    assert client_error_from_metadata("x", status, None) is None
    with pytest.raises(RuntimeError, match="server"):
        raise_client_error_or(RuntimeError("server"), "no", status, None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("no"), 429),
        (SlowClientError("no"), 408),
        (DeadlineExceededError("no"), 504),
    ],
)
def test_vllms_handlers_know_the_status_too(error: OmniError, status: int) -> None:
    assert http_status(error) == status
    described = create_error_response(error).error
    assert (described.code, described.message) == (status, "no")
    got = client_error_from_metadata(str(error), *client_error_metadata(error))
    assert (got is None) == (status >= 500)


def test_defaults() -> None:
    error = GuardrailViolationError("blocked")
    assert (error.status_code, error.error_type) == (400, "BadRequestError")
    assert client_error_metadata(RuntimeError("x")) == (None, None)
    assert http_status(RuntimeError("x")) == 500
