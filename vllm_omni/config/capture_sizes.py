# SPDX-License-Identifier: Apache-2.0
"""Lengths that codec decoders have CUDA graphs for, as a deploy file may give them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from vllm_omni.config.problems import UNKNOWN_KEYS, Problem

KEY = "decode_cudagraph_capture_sizes"
"""In a connector's `extra`: a list, a text of numbers between commas, or one number."""
LONGEST = 4096
"""Frames, minutes of sound: a graph keeps the memory of its decoder's forward for good."""
MOST = 64
"""Each takes its time to be captured at the start."""

_WRONG = f"should be 1 to {MOST} numbers of frames, each from 1 to {LONGEST}"
_DIGITS = re.compile(r" *[0-9]{1,9} *")


def capture_lengths(extra: Mapping[str, Any]) -> tuple[int, ...] | None:
    """In frames, ascending; None where they are not given.

    Raises:
        ValueError: They are no numbers of frames.
    """
    given = extra.get(KEY)
    if given is None:
        return None
    parts = given.split(",") if isinstance(given, str) else given
    parts = parts if isinstance(parts, list | tuple) else [parts]
    lengths = {_length(part) for part in parts}
    if not 1 <= len(lengths) <= MOST:
        raise ValueError(_WRONG)
    return tuple(sorted(lengths))


def _length(part: Any) -> int:
    if isinstance(part, str) and _DIGITS.fullmatch(part):
        part = int(part)
    if isinstance(part, bool) or not isinstance(part, int) or not 1 <= part <= LONGEST:
        raise ValueError(_WRONG)
    return part


def _checked(extra: dict[str, Any]) -> dict[str, Any]:
    try:
        capture_lengths(extra)
    except ValueError as error:
        problems = [Problem(KEY, extra[KEY], str(error))]
        raise PydanticCustomError(UNKNOWN_KEYS, "wrong keys", {"problems": problems}) from None
    return extra


ConnectorExtra = Annotated[dict[str, Any], AfterValidator(_checked)]
"""A connector's `extra`; an error names the key in it."""
