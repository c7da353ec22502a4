# SPDX-License-Identifier: Apache-2.0
"""Scripts run as a user would run them, without the seconds that importing vLLM takes."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path


def run_script(script: Path, *arguments: str, folder: Path, timeout: float = 120) -> str:
    """Run a script in a fork of this process, which must be fit for that, to its end.

    Args:
        script: The file.
        arguments: Of its command line.
        folder: Where it runs.
        timeout: Seconds.

    Returns:
        What it wrote.

    Raises:
        AssertionError: It failed, or took too long.
    """
    log = folder / f"{script.stem}.log"
    command = (str(script), *arguments)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command, folder, log))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    output = log.read_text(errors="replace")
    assert process.exitcode == 0, f"{script.name}: exit code {process.exitcode}\n{output[-4000:]}"
    return output


def _run(command: tuple[str, ...], folder: Path, log: Path) -> None:
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    # A test runner has put streams of its own in the places of these.
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")
