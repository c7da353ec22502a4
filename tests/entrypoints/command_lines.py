# SPDX-License-Identifier: Apache-2.0
"""Command lines that are run by forks of one process, which has imported vLLM once for all.

`python -m tests.entrypoints.command_lines` is that process: it reads a JSON list of arguments per
line, runs each to its end, and answers with a line `[exit code, log file]`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_omni.testing.server import ForkedProcess

TIMEOUT_S = 120.0


class CommandLines:
    """The process that forks; a context manager.

    Args:
        env: Its environment, and so that of the command lines.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=Path(__file__).parents[2],
        )

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end; what it writes, to either stream, is `stderr`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(args) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that forks has ended: {self._process.poll()}"
        code, log = json.loads(answer)
        return subprocess.CompletedProcess(args, code, "", Path(log).read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()  # it ends with its input


def main() -> None:
    """Read, fork, answer."""
    import vllm_omni.config.cli
    import vllm_omni.entrypoints.cli.serve
    import vllm_omni.entrypoints.http_server
    import vllm_omni.entrypoints.openai.app  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(sys.stdin):
            log = Path(folder) / str(number)
            sys.argv = ["vllm-omni", *json.loads(line)]  # vLLM's `bench` looks there
            process = ForkedProcess(sys.argv, log, {})
            try:
                code = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            print(json.dumps([code, str(log)]), flush=True)


if __name__ == "__main__":
    main()
