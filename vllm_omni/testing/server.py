# SPDX-License-Identifier: Apache-2.0
"""A live server for tests, benchmarks and examples, started as a user would (row I-02)."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 30.0
_LOG_TAIL_LINES = 30


class ServerStartError(RuntimeError):
    """The server did not become healthy; carries the end of its log."""


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OmniServer:
    """`vllm serve MODEL --omni` in a process of its own; a context manager.

    Args:
        model: Folder or hub name of the checkpoint.
        flags: Further command-line flags.
        log: File that takes the server's output.
        env: Environment variables on top of this process's.
        port: Port to listen on; a free one if None.
        start_timeout: Seconds until it must be healthy.
    """

    def __init__(
        self,
        model: Path | str,
        flags: Sequence[str] = (),
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        start_timeout: float = START_TIMEOUT_S,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self.start_seconds = 0.0
        self._start_timeout = start_timeout
        main = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--omni"]
        self._command = [*main, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's root process."""
        assert self._process is not None, "the server has not been started"
        return self._process

    def start(self) -> Self:
        """Start it and wait until `/health` says 200.

        Raises:
            ServerStartError: It ended, or took too long.
        """
        began = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
            )
        while not self.healthy():
            if self._process.poll() is not None:
                raise ServerStartError(
                    f"the server ended with code {self._process.returncode}:\n{self.log_tail()}"
                )
            if time.monotonic() - began > self._start_timeout:
                self.kill()
                raise ServerStartError(
                    f"not healthy after {self._start_timeout:g} s:\n{self.log_tail()}"
                )
            time.sleep(0.1)
        self.start_seconds = time.monotonic() - began
        return self

    def healthy(self) -> bool:
        """Whether `/health` answers 200 now."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def stop(self, number: signal.Signals = signal.SIGINT, timeout: float = STOP_TIMEOUT_S) -> int:
        """Signal it and return its exit code; killed if it takes longer than `timeout`."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
