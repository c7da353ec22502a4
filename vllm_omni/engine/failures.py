# SPDX-License-Identifier: Apache-2.0
"""What a request's caller is told about each kind of failure (rows A-45, B-03, B-04)."""

from http import HTTPStatus

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.engine.messages import ErrorMessage
from vllm_omni.errors import (
    OmniGenerateError,
    StageUnavailableError,
    client_error_metadata,
)
from vllm_omni.outputs import ErrorInfo


def raised(request_id: str, error: Exception, stage_id: int) -> ErrorMessage:
    """It was raised in this process; a client error keeps its status and type."""
    status, kind = client_error_metadata(error)
    return ErrorMessage(
        error=str(error),
        request_id=request_id,
        stage_id=stage_id,
        status_code=status,
        error_type=kind,
        cause=error,
    )


def reported(request_id: str, error: ErrorInfo, stage_id: int) -> ErrorMessage:
    """A stage's process reported it of this request."""
    unavailable = error.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    return ErrorMessage(
        error=error.message,
        request_id=request_id,
        stage_id=stage_id,
        status_code=error.status_code,
        error_type=error.error_type,
        param=error.param,
        cause=StageUnavailableError(error.message) if unavailable else None,
    )


def unavailable(request_id: str, stage_id: int) -> ErrorMessage:
    """A stage that it needs has no live replica."""
    text = f"Stage-{stage_id} has no live replica"
    return ErrorMessage(
        error=text,
        request_id=request_id,
        stage_id=stage_id,
        fatal=True,
        cause=StageUnavailableError(text),
    )


def lost(request_id: str, error: EngineDeadError, stage_id: int) -> ErrorMessage:
    """The replica that had it died."""
    return ErrorMessage(
        error=str(error), request_id=request_id, stage_id=stage_id, fatal=True, cause=error
    )


def given_up(request_id: str, why: str) -> ErrorMessage:
    """The server itself ends it."""
    return ErrorMessage(error=why, request_id=request_id, cause=OmniGenerateError(why))
