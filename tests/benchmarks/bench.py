# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni` in forks of this process, which has imported vLLM already.

Not within it: the command sets logging and the environment up for itself, for whatever is forked
afterwards too.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import vllm_omni.entrypoints.cli.main  # noqa: F401 - so that forks have it
from vllm_omni.testing.server import ForkedProcess

TIMEOUT_S = 120.0


def started(log: Path, *args: str) -> ForkedProcess:
    """It runs; what it writes is written to `log`."""
    argv = ["vllm", "bench", "serve", "--omni", "--disable-tqdm", *args]
    with mock.patch.object(sys, "argv", argv):  # vLLM's `bench` looks there
        return ForkedProcess(argv, log, {})


def command_line(*args: str) -> None:
    """Run it to its end; what it writes is written to `sys.stderr`.

    Raises:
        SystemExit: It failed, with its exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        code = started(log, *args).wait(TIMEOUT_S)
        print(log.read_text(), end="", file=sys.stderr)
    if code:
        raise SystemExit(code)


def bench(url: str, backend: str, folder: Path, *args: str) -> dict[str, Any]:
    """Ask a server of the model `tiny` and return the saved result."""
    file = folder / "result.json"
    saving = ("--save-result", "--save-detailed", "--result-filename", str(file))
    command_line("--base-url", url, "--model", "tiny", "--backend", backend, *saving, *args)
    result: dict[str, Any] = json.loads(file.read_text())
    return result
