# SPDX-License-Identifier: Apache-2.0
"""Structured outputs that cannot be: whose fault that is, and which field says so.

vLLM checks a grammar before it takes a request, and names no field then. One that is well formed
and yet admits no text it notices only while it samples, and calls its own error.
"""

from http import HTTPStatus

import regex as re
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from vllm_omni.errors import OmniClientError
from vllm_omni.outputs import ErrorInfo

FIELD = "structured_outputs"
HOPELESS = ErrorInfo(
    message=f"`{FIELD}` (or `response_format`): no text that the model can go on with matches it",
    status_code=int(HTTPStatus.BAD_REQUEST),
    error_type="BadRequestError",
    param=FIELD,
)
_ABOUT_GRAMMAR = re.compile(
    r"Grammar error|Invalid (JSON )?grammar|Invalid structural tag|Choice '|Failed to transform "
    r"|The provided JSON schema|Regex compilation|Trigger |No structural tags|structured_outputs"
)
_FAILED = "error"


def is_constrained(params: SamplingParams) -> bool:
    """Whether a grammar decides which tokens may be sampled."""
    return params.structured_outputs is not None


def grammar_refusal(error: Exception, params: SamplingParams) -> OmniClientError | None:
    """What vLLM said of a grammar, with the field; None if it is about something else."""
    message = str(error.args[0]) if error.args else ""
    if not is_constrained(params) or not _ABOUT_GRAMMAR.match(message):
        return None
    return OmniClientError(f"`{FIELD}` (or `response_format`): {message}", param=FIELD)


def is_stuck(output: RequestOutput) -> bool:
    """Whether vLLM ended a constrained request because its grammar took no token."""
    return any(each.finish_reason == _FAILED for each in output.outputs)
