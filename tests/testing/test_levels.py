# SPDX-License-Identifier: Apache-2.0
"""Run levels choose tests (I-01)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

SUITE = """
import pytest

def test_unmarked(): pass

@pytest.mark.core_model
def test_core(): pass

@pytest.mark.advanced_model
def test_advanced(): pass

@pytest.mark.full_model
def test_full(): pass

@pytest.mark.cuda
def test_cuda(): pass
"""


LEVELS = {"core_model": 2, "advanced_model": 3, "full_model": 4}
RUN = """
import sys, pytest

for level in sys.argv[1].split(","):
    assert pytest.main([*sys.argv[2:], f"--run-level={level}"]) == 0
"""


def test_a_level_includes_the_ones_below(tmp_path: Path) -> None:
    """All in one process of their own, which imports torch."""
    root = Path(__file__).parents[2]
    (tmp_path / "test_suite.py").write_text(SUITE)
    options = ["-c", str(root / "pyproject.toml"), "-p", "tests.conftest", f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, ",".join(LEVELS), str(tmp_path), "-q", *options],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if " passed, " in line]
    for line, passed in zip(told, LEVELS.values(), strict=True):
        assert line.startswith(f"{passed} passed, {5 - passed} skipped")
