# SPDX-License-Identifier: Apache-2.0
"""The process that an engine core lives under, forked by the fork server.

vLLM starts an engine core as a child of whoever asks. Here that is a process of its own: it does
the start-up handshake, tells the server when the engine core is ready or why it is not, and ends it
when it is asked to, when the server is gone, or when it is itself told to end. The server connects
to the engine core's sockets as vLLM's front ends do to engines that they do not manage.
"""

import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from vllm.config import VllmConfig
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine.utils import CoreEngineProcManager, EngineZmqAddresses, launch_core_engines
from vllm.v1.executor.abstract import Executor

from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.connectors.segments import raze
from vllm_omni.fork_server import Child, Lifeline, fork_server
from vllm_omni.start_report import (
    START_LOG,
    Check,
    StartFailure,
    StartLog,
    StartReport,
    receive_report,
)

HOST_PID = "VLLM_OMNI_HOST_PID"
"""Environment variable of an engine core: the process that it ends with."""

FOLDER = "VLLM_RPC_BASE_PATH"
"""Environment variable of an engine core: the folder of its sockets, which goes with it."""

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
StartMethod = Literal["fork", "spawn"]
STOP_S = 3.0
"""What an engine core gets to end by itself, where no other time was asked for."""
AT_ONCE_S = 0.1
"""What one gets that has never served."""
KILL_S = 5.0
"""How long a process may take to be gone once it has been killed."""
_SIGNALLED = 128
"""Added to the number of the signal that ended an engine core, as shells do."""


class HostedCore:
    """An engine core and its host, from the server's side.

    Args:
        child: The host.
        addresses: Where the engine core's front end listens for it.
        folder: Of all its sockets.
    """

    def __init__(self, child: Child, addresses: EngineZmqAddresses, folder: str) -> None:
        self.child = child
        self.addresses = addresses
        self._folder = folder
        self.pid: int | None = None
        self._core: int | None = None

    @classmethod
    def start(
        cls,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        environment: dict[str, str],
        start_method: StartMethod = "fork",
    ) -> Self:
        """Begin to start an engine core; `wait_until_ready` says how it went.

        Args:
            vllm_config: Its config; no engine has used it yet.
            executor_class: vLLM's, for that config.
            log_stats: Have it keep statistics.
            environment: All of its environment variables.
            start_method: Of the engine core. One that is forked has what the server had imported.
        """
        # All of its sockets, those that vLLM makes there included, go with one folder.
        folder = tempfile.mkdtemp(prefix="vllm-omni-", dir=environment.get(FOLDER))
        addresses = EngineZmqAddresses(
            inputs=[f"ipc://{folder}/in"], outputs=[f"ipc://{folder}/out"]
        )
        try:
            child = fork_server().fork(
                _host,
                vllm_config,
                executor_class,
                log_stats,
                addresses,
                folder,
                start_method,
                environment={**environment, FOLDER: folder},
            )
        except BaseException:
            shutil.rmtree(folder)
            raise
        return cls(child, addresses, folder)

    @property
    def client_addresses(self) -> dict[str, Any]:
        """As vLLM's front ends take them."""
        return {
            "input_address": self.addresses.inputs[0],
            "output_address": self.addresses.outputs[0],
        }

    def wait_until_ready(self, timeout: float, check: Check) -> None:
        """Block until the model is loaded; see `receive_report`.

        Raises:
            StartFailure: It did not start; says why, with the last lines of its log.
        """
        report = receive_report(self.child, timeout, check)
        report.raise_for_failure()
        self.pid = report.pid
        with suppress(ProcessLookupError):
            self._core = os.pidfd_open(report.pid)

    def raise_if_ended(self) -> None:
        """Raise `StartFailure` if it has ended meanwhile: vLLM's front end would wait for it."""
        if not self.child.alive:
            raise StartFailure.ended(self.child.exit_code)

    def stop(self, timeout: float | None = None) -> None:
        """End it, by force when it has not ended `timeout` seconds later. Idempotent."""
        grace = timeout or STOP_S
        with suppress(OSError):
            self.child.link.send_bytes(msgspec.msgpack.encode(grace))
        self.child.stop(grace + KILL_S)
        self._kill_core()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_core(self) -> None:
        """End an engine core that its host could not: both may have been stopped."""
        core, self._core = self._core, None
        if core is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(core, signal.SIGKILL)
            os.close(core)


class _Host:
    """The host's side: what it has to end, and how long that may take."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self.manager: CoreEngineProcManager | None = None
        self.grace = STOP_S

    def end_with_the_server(self) -> None:
        """Have a thread end this process when the server asks for it, or is gone."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        threading.Thread(target=self._wait_for_the_end, name="lifeline", daemon=True).start()

    def _wait_for_the_end(self) -> None:
        link = self._lifeline.link
        if link in wait([link, self._lifeline.server]):
            with suppress(EOFError, OSError):
                self.grace = msgspec.msgpack.decode(link.recv_bytes(), type=float)
        os.kill(os.getpid(), signal.SIGTERM)

    def stop_core(self) -> None:
        """End the engine core, by force if it takes too long."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.manager is not None:
            self.manager.shutdown(self.grace)
            for process in self.manager.processes:
                # vLLM does not wait for those that it kills, and they hold memory until then.
                process.join(KILL_S)


def _host(
    lifeline: Lifeline,
    vllm_config: VllmConfig,
    executor_class: type[Executor],
    log_stats: bool,
    addresses: EngineZmqAddresses,
    folder: str,
    start_method: StartMethod,
) -> None:
    """The process."""
    place = ArStageConfig.of(vllm_config)
    set_process_title(f"OmniHost_{place.stage}")
    host = _Host(lifeline)
    os.environ[START_METHOD] = start_method
    os.environ[HOST_PID] = str(os.getpid())
    os.environ[START_LOG] = os.path.join(folder, "start")
    log = StartLog(Path(os.environ[START_LOG]))
    host.end_with_the_server()
    try:
        try:
            with launch_core_engines(vllm_config, executor_class, log_stats, addresses) as launched:
                assert isinstance(launched.engine_manager, CoreEngineProcManager)
                host.manager = launched.engine_manager
        except Exception as error:  # Whatever it is, the server gets to know, and this ends.
            codes = host.manager.finished_procs().values() if host.manager else ()
            lifeline.link.send_bytes(log.failure(error, next(iter(codes), None)).encode())
            return
        (core,) = host.manager.processes
        log.end()
        lifeline.link.send_bytes(StartReport(pid=core.pid or 0).encode())
        wait([core.sentinel])
        core.join(KILL_S)  # The sentinel is readable a moment before the exit code is there.
        if core.exitcode:
            sys.exit(core.exitcode if core.exitcode > 0 else _SIGNALLED - core.exitcode)
    finally:
        host.stop_core()
        # The server does this too, if it still can.
        shutil.rmtree(folder, ignore_errors=True)
        if lifeline.server_gone:
            raze(place.deployment_id)
