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


@dataclass(frozen=True)
class Outcome:
    """How a group ended.

    Attributes:
        code: pytest's exit code, 0 where the group had nothing to run.
        summary: The lines that name what failed, and pytest's last one.
    """

    group: str
    code: int
    seconds: float
    summary: tuple[str, ...]


def run(group: Group, extra: list[str]) -> Outcome:
    """Run one group; its output is printed whole when it has ended."""
    began = time.monotonic()
    again = [f"--reruns={group.attempts - 1}"] if group.attempts > 1 else []
    command = [sys.executable, "-m", "pytest", *arguments(group), *again, *extra]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    took = time.monotonic() - began
    print(f"===== {group.name} ({took:.0f} s) =====\n{done.stdout}", flush=True)
    code = 0 if done.returncode == NO_TESTS else done.returncode
    lines = done.stdout.strip().splitlines() or ["no output"]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return Outcome(group.name, code, took, (*failed, lines[-1].strip("= ")))


def summarize(outcomes: list[Outcome]) -> None:
    """Print every group in a few lines, last, where a log that was cut at its head still has it."""
    print("===== summary =====")
    for each in sorted(outcomes, key=lambda outcome: outcome.code != 0):
        print(f"{each.group} ({each.seconds:.0f} s): {'FAILED' if each.code else 'passed'}")
        for line in each.summary:
            print(f"  {line[:300]}")
    sys.stdout.flush()


def main() -> int:
    """Run all groups; the first failing one's code is the result."""
    waiting = deque(GROUPS)
    outcomes: list[Outcome] = []

    def lane() -> None:
        while waiting:
            outcomes.append(run(waiting.popleft(), sys.argv[1:]))

    lanes = [threading.Thread(target=lane) for _ in range(LANES)]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    summarize(outcomes)
    return next((outcome.code for outcome in outcomes if outcome.code), 0)


if __name__ == "__main__":
    sys.exit(main())
