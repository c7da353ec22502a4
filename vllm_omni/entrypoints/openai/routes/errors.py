# SPDX-License-Identifier: Apache-2.0
"""The errors that every route may answer with, for the OpenAPI document."""

from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse

ERRORS: dict[int | str, dict[str, Any]] = {
    status.value: {"model": ErrorResponse}
    for status in (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
}
