# SPDX-License-Identifier: Apache-2.0
"""Prompts of which a text encoder reads only the beginning (CLIP: 77 tokens) are told in the log.

diffusers warns of it, without saying whose prompt it is. Another encoder of the same pipeline (T5)
may read the whole, so that it is no error.
"""

import logging

import regex as re

from vllm_omni.diffusion.program import current_program

logger = logging.getLogger(__name__)

_CUT = re.compile(
    r"The following part of your input was truncated because (?P<why>.{1,200}?): *\[(?!''\])",
    re.DOTALL,
)
"""Not where what was cut off has no text: an end mark that did not fit."""


class TruncationLog(logging.Handler):
    """Says of diffusers' warnings about cut prompts which request they are about."""

    def emit(self, record: logging.LogRecord) -> None:
        """Note it, if it is such a warning and a request is at work."""
        program = current_program()
        found = _CUT.search(record.getMessage())
        if program is not None and found is not None:
            logger.warning(
                "%s: the end of its prompt is not read by one text encoder: %s",
                program.request_id,
                found["why"],
            )


def tell_truncations() -> None:
    """Listen to diffusers' log from now on, once for this process."""
    theirs = logging.getLogger("diffusers")
    if not any(isinstance(handler, TruncationLog) for handler in theirs.handlers):
        theirs.addHandler(TruncationLog(logging.WARNING))
