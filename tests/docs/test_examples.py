# SPDX-License-Identifier: Apache-2.0
"""No example is without a test that runs it."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

ROOT = Path(__file__).parents[2]
OTHERWISE = {"examples/demo.py": "`make demo` is it"}


def test_every_example_is_named_by_a_test_of_its_folder() -> None:
    examples = [path for end in ("py", "sh") for path in (ROOT / "examples").rglob(f"*.{end}")]
    tests = [path.read_text() for path in (ROOT / "tests" / "entrypoints").glob("test_*.py")]
    assert len(examples) > 15
    without = [
        name
        for path in examples
        if (name := path.relative_to(ROOT).as_posix()) not in OTHERWISE
        and not any(f'"{path.parent.name}"' in test and f'"{path.stem}' in test for test in tests)
    ]
    assert without == []
