# SPDX-License-Identifier: Apache-2.0
"""What is known of one video that is made in the background."""

import secrets
from typing import Literal

import msgspec
import regex as re

from vllm_omni.errors import OmniClientError, OmniError, http_status
from vllm_omni.outputs import StageMetrics

Status = Literal["queued", "in_progress", "completed", "failed"]

_ID = re.compile(r"video_[0-9a-f]{32}")
_RESTARTED = "the server was stopped before the video was finished"


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job failed.

    Attributes:
        status_code: The HTTP status that a synchronous request would have got.
        type: OpenAI's `type`.
        param: The request field at fault, if it is one.
    """

    message: str
    status_code: int
    type: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> "JobError":
        """What a client may know of an error."""
        match error:
            case OmniClientError():
                status, kind, param = error.status_code, error.error_type, error.param
                return cls(message=error.message, status_code=status, type=kind, param=param)
            case OmniError():
                return cls(
                    message=str(error), status_code=http_status(error), type="InternalServerError"
                )
        message = "Internal server error. The server's log has the details."
        return cls(message=message, status_code=500, type="InternalServerError")


STOPPED = JobError(message=_RESTARTED, status_code=503, type="ServiceUnavailableError")


class VideoJob(msgspec.Struct, frozen=True, kw_only=True):
    """One video; also what lies on disk beside it.

    Attributes:
        id: `video_` and 32 hexadecimal digits, which nobody can guess.
        owner: Whose it is: a digest of an API key, or empty on a server without keys.
        created_at: Unix time, in seconds, as all others.
        serial: Larger than that of every job made before.
        model: The model's served name.
        prompt: What was asked for.
        seconds: Its length as it was asked for.
        size: Its size as WIDTHxHEIGHT, as it was asked for or as it came out.
        status: Where it is.
        progress: Percent.
        completed_at: When it was finished, or failed.
        expires_at: When it will be removed; None while it is being made.
        content_bytes: Size of the finished file.
        metrics: Timing of the finished job, in seconds.
        stages: Timing of each stage, if it was asked for.
        error: Why it failed.
    """

    id: str
    owner: str
    created_at: int
    serial: int
    model: str
    prompt: str
    seconds: str | None = None
    size: str | None = None
    status: Status = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: int | None = None
    content_bytes: int = 0
    metrics: dict[str, float] = {}
    stages: tuple[StageMetrics, ...] = ()
    error: JobError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.status in ("completed", "failed")


def new_job_id() -> str:
    """An id that nobody has and nobody can guess."""
    return f"video_{secrets.token_hex(16)}"


def is_job_id(text: str) -> bool:
    """Whether a job may be called so. What is no id never becomes part of a path."""
    return _ID.fullmatch(text) is not None
