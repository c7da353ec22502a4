# SPDX-License-Identifier: Apache-2.0
"""The one error hierarchy (DESIGN.md section 9; rows A-44, A-45, B-01).

`OmniError` is anything this project raises on purpose. Whether the client or the server is at fault
is decided where the error is raised and kept over every hop: the pair (status, type) travels in
messages and is turned back into the same class on the other side. `http_status` is the one place
that maps an error to a status code. An error that may come up while vLLM's own handlers stream is
a `GracefulHTTPError` as well, so that they tell its status too.
"""

import errno
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError


class OmniError(Exception):
    """Base of all errors raised on purpose."""


class OmniConfigError(OmniError, ValueError):
    """A pipeline, deploy file, flag or override is wrong; the message names place and fix."""


class OmniClientError(OmniError, ValueError):
    """The request is at fault; the client gets the message, the status and the type unchanged.

    Args:
        message: What is wrong and what would be right; names the field.
        status_code: HTTP status, 400 to 499.
        error_type: The `type` of OpenAI's error object.
        param: The request field at fault, in dotted notation (`messages.0.content`).
        code: OpenAI's machine-readable `code`, if the field has one.
    """

    def __init__(
        self,
        message: str,
        status_code: int = HTTPStatus.BAD_REQUEST,
        error_type: str = "BadRequestError",
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = int(status_code)
        self.error_type = error_type
        self.param = param
        self.code = code


class GuardrailViolationError(OmniClientError):
    """The model's guardrail refused the input."""


class OverloadedError(OmniClientError, GracefulHTTPError):
    """There are too many requests, here or of this client; it may come again later."""

    http_status = HTTPStatus.TOO_MANY_REQUESTS

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.TOO_MANY_REQUESTS, "RateLimitError", code="queue_full")


class SlowClientError(OmniClientError, GracefulHTTPError):
    """The client did not take its answer, or did not send its request, in time."""

    http_status = HTTPStatus.REQUEST_TIMEOUT

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.REQUEST_TIMEOUT, "RequestTimeoutError")


class DeadlineExceededError(OmniError, GracefulHTTPError):
    """The request took longer than it may."""

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.GATEWAY_TIMEOUT)


class StageUnavailableError(OmniError, RuntimeError):
    """No live replica can take the request (routing or capacity); not a death of the engine."""


class StorageFullError(OmniError, RuntimeError):
    """There is no room on the disk for what the request brings or makes."""


class OmniGenerateError(OmniError, RuntimeError):
    """A request failed inside a stage through no fault of the client."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a write to a disk without room fails with."""


def is_client_error_status(status_code: int | None) -> bool:
    """Whether a status blames the client: 400 <= status < 500. None is not."""
    return status_code is not None and 400 <= status_code < 500


def client_error_metadata(error: BaseException) -> tuple[int | None, str | None]:
    """The (status, type) that a message carries for this error; (None, None) for a server error."""
    if isinstance(error, OmniClientError):
        return error.status_code, error.error_type
    return None, None


def client_error_from_metadata(
    message: str, status_code: int | None, error_type: str | None, param: str | None = None
) -> OmniClientError | None:
    """The client error that a message described, or None if it described a server error."""
    if not is_client_error_status(status_code):
        return None
    assert status_code is not None
    return OmniClientError(message, status_code, error_type or "BadRequestError", param=param)


def raise_client_error_or(
    fallback: Exception, message: str, status_code: int | None, error_type: str | None
) -> None:
    """Raise the described client error, else `fallback`. Never returns."""
    raise client_error_from_metadata(message, status_code, error_type) or fallback


def http_status(error: BaseException) -> int:
    """HTTP status of any error that reaches a route."""
    if isinstance(error, OmniClientError):
        return error.status_code
    if isinstance(error, StageUnavailableError):
        return int(HTTPStatus.SERVICE_UNAVAILABLE)
    if isinstance(error, StorageFullError):
        return int(HTTPStatus.INSUFFICIENT_STORAGE)
    if isinstance(error, DeadlineExceededError):
        return int(HTTPStatus.GATEWAY_TIMEOUT)
    return int(HTTPStatus.INTERNAL_SERVER_ERROR)
