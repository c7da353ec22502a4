# SPDX-License-Identifier: Apache-2.0
"""What can be wrong in a realtime session (row A-48), and how it is said."""

from enum import StrEnum
from http import HTTPStatus

from pydantic import ValidationError

from vllm_omni.errors import OmniClientError


class Code(StrEnum):
    """`error.code`. The first six are vLLM-Omni's, the next three OpenAI's, then limits.

    The last two are of what a session of speech is asked to speak, where nothing says it better.
    """

    INVALID_JSON = "invalid_json"
    INVALID_EVENT = "invalid_event"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_NOT_VALIDATED = "model_not_validated"
    UNKNOWN_EVENT = "unknown_event"
    INVALID_AUDIO = "invalid_audio"
    COMMIT_EMPTY = "input_audio_buffer_commit_empty"
    RESPONSE_ACTIVE = "conversation_already_has_active_response"
    RESPONSE_NOT_ACTIVE = "response_cancel_not_active"
    FRAME_TOO_LARGE = "frame_too_large"
    RATE_LIMIT = "rate_limit_exceeded"
    IDLE = "idle_timeout"
    TOO_MANY_SESSIONS = "too_many_sessions"
    SESSION_FULL = "session_full"
    INVALID_REQUEST = "invalid_request"
    INTERNAL = "internal_error"


class EventError(OmniClientError):
    """An event of the client is wrong; the session goes on."""

    def __init__(self, code: Code, message: str, param: str | None = None) -> None:
        super().__init__(
            message, HTTPStatus.BAD_REQUEST, "invalid_request_error", param=param, code=code
        )


class SessionEnd(EventError):
    """The client broke a limit: it is told, and the WebSocket is closed.

    Args:
        code: For the last event.
        message: For the last event.
        close_code: Of the WebSocket (RFC 6455, section 7.4).
    """

    def __init__(self, code: Code, message: str, close_code: int) -> None:
        super().__init__(code, message)
        self.close_code = close_code


def invalid_event(error: ValidationError) -> EventError:
    """The error for an event that has not the fields it should have."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    param = ".".join(str(part) for part in first["loc"])
    if isinstance(cause, OmniClientError):
        return EventError(Code.INVALID_EVENT, cause.message, cause.param)
    if first["type"] == "missing":
        return EventError(Code.INVALID_EVENT, f"Missing required field: {param}", param)
    return EventError(Code.INVALID_EVENT, f"Invalid field {param}: {first['msg']}", param)
