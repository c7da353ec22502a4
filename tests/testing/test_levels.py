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


@pytest.mark.parametrize(
    ("level", "passed"), [("core_model", 2), ("advanced_model", 3), ("full_model", 4)]
)
def test_a_level_includes_the_ones_below(level: str, passed: int, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", str(tmp_path), "-q", f"--run-level={level}"),
            *("-c", str(root / "pyproject.toml"), "-p", "tests.conftest", f"--rootdir={tmp_path}"),
        ],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{passed} passed, {5 - passed} skipped" in done.stdout
