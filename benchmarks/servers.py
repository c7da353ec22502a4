# SPDX-License-Identifier: Apache-2.0
"""A served pipeline in a process tree of its own, and what that tree uses and leaves behind."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from common import WORK

MARK = "VLLM_OMNI_BENCHMARK_RUN"
"""Environment variable that marks every process of a server, whoever its parent is by now."""
SHM = Path("/dev/shm")
START_TIMEOUT_S = 240
MODEL = "bench"


class Server:
    """`vllm serve MODEL --omni` as a user types it.

    Args:
        model: Checkpoint.
        flags: Further flags.
        environment: Further environment variables.
    """

    def __init__(self, model: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.run_id = uuid.uuid4().hex
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._seen: set[psutil.Process] = set()
        WORK.mkdir(parents=True, exist_ok=True)
        self.log = WORK / "server.log"
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--omni"]
        options = ["--port", str(self.port), "--served-model-name", MODEL, *flags]
        settings = {
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        with self.log.open("w") as log:
            self.began = time.monotonic()
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings, MARK: self.run_id},
            )

    def wait_until_healthy(self) -> float:
        """Seconds from the command to the first 200 of /health."""
        while time.monotonic() < self.began + START_TIMEOUT_S:
            if self.process.poll() is not None:
                break
            if self.health() == 200:
                return time.monotonic() - self.began
            time.sleep(0.05)
        self.kill_all()
        raise SystemExit(f"the server did not start; see {self.log}")

    def health(self) -> int | None:
        """The status of /health; None without an answer."""
        return health(self.url)

    def tree(self) -> list[psutil.Process]:
        """Every live process of this server, oldest first: descendants seen so far, and orphans.

        An orphan is known by the mark in its environment, but a process that sets its title
        overwrites that, so descendants are remembered as well.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            self._seen.update([server, *server.children(recursive=True)])
        self._seen.update(each for each in psutil.process_iter() if self._has_mark(each))
        self._seen = {each for each in self._seen if _lives(each)}
        return sorted(self._seen, key=lambda each: (each.create_time(), each.pid))

    def _has_mark(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.run_id
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            return False

    def stage_processes(self, engine: str) -> list[psutil.Process]:
        """The processes that run stages of an engine (`ar` or `diffusion`), oldest first."""
        return [each for each in self.tree() if engine_of(each) == engine]

    def segments(self) -> list[str]:
        """This server's files in /dev/shm: a deployment's id starts with the server's pid."""
        own = re.compile(rf"vllm-omni-{self.process.pid}-")
        return sorted(name for name in os.listdir(SHM) if own.match(name))

    def running_requests(self) -> int:
        """Requests in the thinker, by vLLM's metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        name, stage = "vllm:num_requests_running{", 'stage="thinker"'
        running = [line for line in lines if line.startswith(name) and stage in line]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in running))

    def wait(self, timeout: float) -> int | None:
        """The server's exit code; None if it has not ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout)
        return None

    def kill_all(self) -> None:
        """End whatever is left."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


@contextlib.contextmanager
def served(model: Path, *flags: str) -> Iterator[Server]:
    """A healthy server, stopped by SIGINT afterwards."""
    server = Server(model, *flags)
    try:
        server.wait_until_healthy()
        yield server
        server.process.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        server.kill_all()


def health(url: str) -> int | None:
    """The status of a server's /health; None without an answer."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def engine_of(process: psutil.Process) -> str | None:
    """What kind of engine a process runs; None for the server itself and for helpers."""
    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return None
    if "VLLM::EngineCore" in title:
        return "ar"
    return "diffusion" if "VLLM::OmniDiffusion" in title else None


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], bool], timeout: float) -> float | None:
    """Seconds until a condition held; None if it did not in time."""
    began = time.monotonic()
    while time.monotonic() < began + timeout:
        if condition():
            return time.monotonic() - began
        time.sleep(0.1)
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
