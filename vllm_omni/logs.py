# SPDX-License-Identifier: Apache-2.0
"""Log lines: one form in every process, and the request's id in every line about a request.

In the serving process the id is a context variable, so vLLM's lines carry it too. Behind the
orchestrator nothing runs for one request alone; there each line names its request, by an id that
contains the client's (`chatcmpl-<id>-<n>`).
"""

import logging
import uuid
from contextvars import ContextVar

import regex as re

MAX_REQUEST_ID = 64
"""Most characters that are kept of a client's request id."""
_STRANGE = re.compile(r"[^A-Za-z0-9._:-]")
_request_id: ContextVar[str] = ContextVar("vllm_omni_request_id", default="")


def clean_request_id(given: str | None) -> str:
    """A request id that is safe in a log, a header and a file name.

    Args:
        given: The client's; what is not a letter, digit, `.`, `_`, `:` or `-` is dropped.

    Returns:
        At most `MAX_REQUEST_ID` characters; a new id if nothing is left.
    """
    kept = _STRANGE.sub("", (given or "")[: 4 * MAX_REQUEST_ID])[:MAX_REQUEST_ID]
    return kept or uuid.uuid4().hex


def set_request_id(request_id: str) -> None:
    """Say which request the current context works for."""
    _request_id.set(request_id)


def current_request_id() -> str:
    """The request that the current context works for; empty if for none."""
    return _request_id.get()


class RequestIdFilter(logging.Filter):
    """Puts the context's request id before a record's message, and into `record.request_id`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: nothing is filtered out."""
        if "request_id" not in record.__dict__:
            request_id = _request_id.get()
            record.request_id = request_id or "-"
            if request_id and request_id not in str(record.msg):
                record.msg = f"[{request_id}] {record.msg}"
        return True


_filter = RequestIdFilter()


def log_as_vllm() -> None:
    """Send this project's log where vLLM's goes, in the same form, with request ids."""
    ours, theirs = logging.getLogger("vllm_omni"), logging.getLogger("vllm")
    for handler in theirs.handlers:
        handler.addFilter(_filter)
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
