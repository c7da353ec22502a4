# SPDX-License-Identifier: Apache-2.0
"""How a configuration mistake is told: place, key path, value, and the nearest right key."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_omni.errors import OmniConfigError

UNKNOWN_KEYS = "omni_unknown_keys"
"""Type of the pydantic error that carries `Problem`s of one section in its context."""


class Problem(NamedTuple):
    """One thing wrong with one key."""

    path: str
    value: Any
    message: str


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that was most likely meant."""
    matches = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing."""
    match = nearest(key, known)
    return f"; did you mean {match!r}?" if match else ""


def key_path(location: Sequence[str | int]) -> str:
    """`("stages", 1, "devices")` as `stages[1].devices`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else str(part)
    return path


def config_error(where: str, problems: Sequence[Problem]) -> OmniConfigError:
    """One error that tells all of `problems` of one file, flag or argument."""
    lines = [_line(problem) for problem in problems]
    if len(lines) == 1:
        return OmniConfigError(f"{where}: {lines[0]}")
    return OmniConfigError(f"{where}: {len(lines)} errors\n  " + "\n  ".join(lines))


def from_validation_error(
    where: str, error: ValidationError, prefix: Sequence[str | int] = ()
) -> OmniConfigError:
    """Pydantic's findings as one `OmniConfigError`."""
    problems: list[Problem] = []
    for entry in error.errors(include_url=False):
        location = (*prefix, *entry["loc"])
        if entry["type"] == UNKNOWN_KEYS:
            problems += [
                Problem(key_path((*location, found.path)), found.value, found.message)
                for found in entry["ctx"]["problems"]
            ]
        else:
            message = entry["msg"].removeprefix("Value error, ").removeprefix("Input ")
            problems.append(Problem(key_path(location), entry["input"], message))
    return config_error(where, problems)


def _line(problem: Problem) -> str:
    shown = repr(problem.value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    if not problem.path:
        return f"{shown}: {problem.message}"
    return f"{problem.path} = {shown}: {problem.message}"
