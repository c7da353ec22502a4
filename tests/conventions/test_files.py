# SPDX-License-Identifier: Apache-2.0
"""Every source file is licensed and of a size that one can read."""

import pytest

from tests.conventions.sources import FOLDERS, fail_on, python_files, relative

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 500
# file -> why it is one file all the same.
LONG_FILES: dict[str, str] = {}


def test_license_header() -> None:
    problems = []
    for path in python_files(*FOLDERS):
        head = path.read_text().splitlines()[:2]
        if SPDX not in (head[1:] if head and head[0].startswith("#!") else head[:1]):
            problems.append(relative(path))
    fail_on(problems, f"Each Python file starts with the line: {SPDX}")


def test_file_length() -> None:
    lengths = {
        relative(path): len(path.read_text().splitlines()) for path in python_files(*FOLDERS)
    }
    problems = [
        f"{name}: {lines} lines"
        for name, lines in lengths.items()
        if lines > MAX_LINES and name not in LONG_FILES
    ]
    problems += [
        f"LONG_FILES lists {name}, which is short or gone"
        for name in LONG_FILES
        if lengths.get(name, 0) <= MAX_LINES
    ]
    fail_on(
        problems,
        f"A file of more than {MAX_LINES} lines holds more than one noun: split it, or give the "
        "reason in LONG_FILES.",
    )
