# SPDX-License-Identifier: Apache-2.0
"""What a client is told when the model's chat template fails on its request.

vLLM gives the failure's text as it is. A template's own words (`raise_exception` in it) are meant
for the client; those of the template engine or of Python tell nothing but how the template is
written.
"""

from collections.abc import Iterator
from typing import Any

import jinja2

from vllm_omni.errors import OmniClientError

_PYTHON_FAILURES = (TypeError, AttributeError, LookupError, ArithmeticError)


def template_refusal(
    error: Exception, template_kwargs: dict[str, Any] | None
) -> OmniClientError | None:
    """The error for the client, or None if it was not the template that failed.

    Args:
        error: What vLLM raised.
        template_kwargs: The request's `chat_template_kwargs`.
    """
    param = "chat_template_kwargs" if template_kwargs else "messages"
    causes = list(_causes(error))
    if failed := next((each for each in causes if isinstance(each, jinja2.TemplateError)), None):
        if type(failed) is jinja2.TemplateError:
            return OmniClientError(str(failed), param=param)
    elif not template_kwargs or not any(isinstance(each, _PYTHON_FAILURES) for each in causes):
        return None
    return OmniClientError(
        f"`{param}`: the model's chat template cannot use these values.", param=param
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause = error.__cause__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__
