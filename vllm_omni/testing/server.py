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
from contextlib import redirect_stderr, redirect_stdout
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


class ForkedProcess:
    """A forked copy of this process that runs the command line, with what tests need of `Popen`.

    It has vLLM imported already, so a server is up in a third of the time.
    """

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        from vllm_omni.fork_server import run_and_exit  # imports torch and vLLM

        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(lambda: self._run(argv, log, env))

    def _run(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (1, 2):
            os.dup2(output, stream)
        # Only what differs: setproctitle finds the command line by the environment behind it.
        os.environ.update(set(env.items()) - set(os.environ.items()))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        from vllm_omni.entrypoints.cli.main import main

        # A test runner has put streams of its own in the places of these.
        out, err = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        with redirect_stdout(out), redirect_stderr(err):
            main(argv[1:])

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked server", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class OmniServer:
    """`vllm serve MODEL --omni` in a process of its own; a context manager.

    Args:
        model: Folder or hub name of the checkpoint.
        flags: Further command-line flags.
        log: File that takes the server's output.
        env: Environment variables on top of this process's.
        port: Port to listen on; a free one if None.
        start_timeout: Seconds until it must be healthy.
        fork: Fork this process, which must be fit for that, instead of starting a new interpreter.
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
        fork: bool = False,
    ) -> None:
        self._fork = fork
        self.port = port or free_port()
        self.log = log
        self.start_seconds = 0.0
        self._start_timeout = start_timeout
        main = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--omni"]
        self._command = [*main, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self._env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """The server's root process."""
        assert self._process is not None, "the server has not been started"
        return self._process

    def start(self) -> Self:
        """Start it and wait until `/health` says 200.

        Raises:
            ServerStartError: It ended, or took too long.
        """
        began = time.monotonic()
        self.launch()
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

    def launch(self) -> None:
        """Start it, without waiting for anything."""
        if self._fork:
            self._process = ForkedProcess(self._command[2:], self.log, self._env)
            return
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
            )

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
            return self.process.wait()

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
