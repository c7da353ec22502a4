# SPDX-License-Identifier: Apache-2.0
"""Run the test suite in a few pytest processes, two at a time.

Groups are apart because they cannot share a process: engines are forked from a pytest process that
runs none itself, while `tests/models` runs vLLM engines inside of its own, and
`tests/dfx/reliability` forks whole servers. Two at a time because
the suite mostly waits for engines to start, and its machine has two cores.
"""

import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

NO_TESTS = 5
LANES = 2


@dataclass(frozen=True)
class Group:
    """Folders for one pytest process, the longest groups first.

    Attributes:
        attempts: How often a test may run. More than once only where real processes are killed,
            starved and timed on a machine that others load, too; a rerun is shown as `R`.
    """

    name: str
    paths: tuple[str, ...]
    attempts: int = 1


GROUPS = (
    Group("pipelines", ("tests/parity", "tests/ar", "tests/features")),
    Group("server", ("tests/entrypoints", "tests/dfx", "tests/engine"), attempts=2),
    Group("reliability", ("tests/dfx/reliability",), attempts=2),
    Group("checkpoints", ("tests/testing", "tests/observability")),
    Group("diffusion", ("tests/diffusion",)),
    Group("parts", ()),
    Group("models", ("tests/models",)),
)
"""A group without folders takes every folder that no other group names."""


def arguments(group: Group) -> list[str]:
    """pytest's paths for a group."""
    own = group.paths or ("tests",)
    others = [path for each in GROUPS if each is not group for path in each.paths]
    inside = [path for path in others if any(path.startswith(f"{folder}/") for folder in own)]
    return [*own, *(f"--ignore={path}" for path in inside)]


def run(group: Group, extra: list[str]) -> int:
    """Run one group; its output is printed whole when it has ended."""
    began = time.monotonic()
    again = [f"--reruns={group.attempts - 1}"] if group.attempts > 1 else []
    command = [sys.executable, "-m", "pytest", *arguments(group), *again, *extra]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    took = time.monotonic() - began
    print(f"===== {group.name} ({took:.0f} s) =====\n{done.stdout}", flush=True)
    return 0 if done.returncode == NO_TESTS else done.returncode


def main() -> int:
    """Run all groups; the first failing one's code is the result."""
    waiting = deque(GROUPS)
    codes: list[int] = []

    def lane() -> None:
        while waiting:
            codes.append(run(waiting.popleft(), sys.argv[1:]))

    lanes = [threading.Thread(target=lane) for _ in range(LANES)]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
