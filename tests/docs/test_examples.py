# SPDX-License-Identifier: Apache-2.0
"""No example is without a test that runs it."""

import subprocess
import sys
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


ONLINE = sorted(
    each for each in (ROOT / "examples/online_serving").iterdir() if each.suffix != ".md"
)


@pytest.mark.parametrize("example", ONLINE, ids=lambda path: path.name)
def test_online_examples_keep_what_their_readme_says(example: Path) -> None:
    """Each takes `--help`, and reads a key from `OPENAI_API_KEY`."""
    runner = "bash" if example.suffix == ".sh" else sys.executable
    told = subprocess.run([runner, example, "--help"], capture_output=True, text=True, check=True)
    assert "url" in told.stdout or "http" in told.stdout
    assert "OPENAI_API_KEY" in example.read_text()
