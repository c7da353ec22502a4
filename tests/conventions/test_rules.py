# SPDX-License-Identifier: Apache-2.0
"""The package hides no error, runs no data as code and does not guess at objects."""

import ast

import pytest

from tests.conventions.rules import attribute_probes, swallowed_exceptions, unsafe_code
from tests.conventions.sources import (
    PACKAGE,
    Rule,
    fail_on,
    findings,
    parse,
    python_files,
    relative,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

# (file, probing expression) -> why nothing better than a probe is possible there.
ALLOWED_PROBES: dict[tuple[str, str], str] = {}

CAUGHT = [
    (swallowed_exceptions, "try: f()\nexcept: raise"),
    (swallowed_exceptions, "try: f()\nexcept Exception: pass"),
    (swallowed_exceptions, "try: f()\nexcept BaseException as e: ..."),
    (swallowed_exceptions, "try: f()\nexcept (ValueError, Exception): pass"),
    (swallowed_exceptions, "for x in y:\n    try: f()\n    except Exception: continue"),
    (swallowed_exceptions, "with contextlib.suppress(Exception): f()"),
    (unsafe_code, "import pickle"),
    (unsafe_code, "import cloudpickle as cp"),
    (unsafe_code, "from pickle import loads"),
    (unsafe_code, "def f():\n    import dill"),
    (unsafe_code, "eval('1')"),
    (unsafe_code, "exec('1')"),
    (unsafe_code, "import torch\ntorch.load('x')"),
    (unsafe_code, "import torch\ntorch.load('x', weights_only=False)"),
    (unsafe_code, "np.load('x', allow_pickle=True)"),
    (unsafe_code, "from unittest import mock"),
    (unsafe_code, "from unittest.mock import patch"),
    (unsafe_code, "import unittest.mock"),
    (attribute_probes, "getattr(config, 'hidden_size', None)"),
    (attribute_probes, "hasattr(config, 'hidden_size')"),
]
ALLOWED = [
    (swallowed_exceptions, "try: f()\nexcept ValueError: pass"),
    (swallowed_exceptions, "try: f()\nexcept Exception as e: report(e)"),
    (swallowed_exceptions, "with contextlib.suppress(OSError): f()"),
    (unsafe_code, "model.eval()"),
    (unsafe_code, "torch.load('x', weights_only=True)"),
    (unsafe_code, "np.load('x')"),
    (unsafe_code, "from .pickle import x"),
    (attribute_probes, "getattr(config, name)"),
    (attribute_probes, "getattr(config, name, None)"),
]


@pytest.mark.parametrize(("rule", "source"), CAUGHT)
def test_catches(rule: Rule, source: str) -> None:
    assert len(list(rule(ast.parse(source)))) == 1


@pytest.mark.parametrize(("rule", "source"), ALLOWED)
def test_allows(rule: Rule, source: str) -> None:
    assert list(rule(ast.parse(source))) == []


def test_no_error_is_hidden() -> None:
    fail_on(
        findings(swallowed_exceptions),
        "Catch the exceptions you expect by name, or hand the error to whoever waits for it.",
    )


def test_no_data_runs_as_code() -> None:
    fail_on(
        findings(unsafe_code),
        "Serialize with msgspec and raw buffers; load weights with safetensors.",
    )


def test_nothing_is_discovered_by_probing() -> None:
    problems, unused = [], set(ALLOWED_PROBES)
    for path in python_files(PACKAGE):
        for line, probe in attribute_probes(parse(path)):
            if (relative(path), probe) in ALLOWED_PROBES:
                unused.discard((relative(path), probe))
            else:
                problems.append(f"{relative(path)}:{line}: {probe}")
    problems += [f"ALLOWED_PROBES lists {entry}, which is gone" for entry in sorted(unused)]
    fail_on(
        problems,
        "Declare what an object can do (OmniCapabilities, a Protocol, isinstance) and read that. "
        "Where a foreign object leaves no other way, add it to ALLOWED_PROBES with the reason.",
    )
