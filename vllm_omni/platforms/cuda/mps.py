# SPDX-License-Identifier: Apache-2.0
"""CUDA's Multi-Process Service for the stages of a deployment (`cuda_mps: true`).

A GPU runs the work of one process at a time, in turns; so a long batch of a codec holds up the
steps of the engine beside it. Under MPS both run at once. Its daemon is a process of the deployment
and ends with it. (Reference: NVIDIA's "Multi-Process Service" guide.)
"""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import wait

from vllm_omni.errors import OmniConfigError
from vllm_omni.fork_server import Child, Lifeline, fork_server

DAEMON = "nvidia-cuda-mps-control"
START_S = 10.0
STOP_S = 5.0


class CudaMps:
    """A running daemon, and what its clients need.

    Attributes:
        environment: Of every process that is to share the device.

    Raises:
        OmniConfigError: There is no such daemon on this machine, or it does not start.
    """

    def __init__(self) -> None:
        daemon = shutil.which(DAEMON)
        if daemon is None:
            raise OmniConfigError(
                f"cuda_mps: {DAEMON} is not on PATH; it is a part of NVIDIA's driver"
            )
        # The path of a socket may not be long, so it is not where other files go.
        self._folder = tempfile.mkdtemp(prefix="vllm-omni-mps-", dir="/tmp")
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self._folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{self._folder}/log",
        }
        for path in self.environment.values():
            os.mkdir(path)
        environment = {**os.environ, **self.environment}
        self._child: Child = fork_server().fork(_run, daemon, environment=environment)
        deadline = time.monotonic() + START_S
        while not os.listdir(self.environment["CUDA_MPS_PIPE_DIRECTORY"]):
            if not self._child.alive or time.monotonic() > deadline:
                self.close()
                raise OmniConfigError(f"cuda_mps: {DAEMON} did not start")
            time.sleep(0.05)

    def close(self) -> None:
        """End it, after its clients. Idempotent."""
        self._child.link.close()
        self._child.join(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _run(lifeline: Lifeline, daemon: str) -> None:
    """Run the daemon until the server closes the link, or is gone."""
    process = subprocess.Popen([daemon, "-f"], stdin=subprocess.DEVNULL)
    ended = os.pidfd_open(process.pid)
    wait([lifeline.link, lifeline.server, ended])
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.kill()
    process.wait()
