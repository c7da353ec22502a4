# SPDX-License-Identifier: Apache-2.0
"""The project's own Python files, and how a rule reports on them."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_omni"
FOLDERS = (PACKAGE, "tests", "tools", "examples", "benchmarks", ".buildkite")


class Finding(NamedTuple):
    """One place where a rule is broken."""

    line: int
    message: str


Rule = Callable[[ast.Module], Iterable[Finding]]


def python_files(*folders: str) -> Iterator[Path]:
    """Every Python file below `folders`, in a fixed order."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def findings(rule: Rule) -> list[str]:
    """What `rule` finds in the package, as `file:line: message`."""
    return [
        f"{relative(path)}:{finding.line}: {finding.message}"
        for path in python_files(PACKAGE)
        for finding in rule(parse(path))
    ]


def fail_on(problems: list[str], advice: str) -> None:
    """Fail with every problem and, once, what to do about them."""
    if problems:
        pytest.fail("\n".join([*problems, "", advice]), pytrace=False)
