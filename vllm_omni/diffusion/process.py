# SPDX-License-Identifier: Apache-2.0
"""The process of a diffusion replica: forked by the fork server, ended with the server."""

import logging
import shutil
import signal
import socket
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import torch
from vllm.utils.system_utils import decorate_logs, set_process_title

from vllm_omni.connectors.segments import raze
from vllm_omni.diffusion.worker import Worker, WorkerConfig, start_ranks
from vllm_omni.errors import OmniConfigError
from vllm_omni.fork_server import Lifeline, fork_server
from vllm_omni.start_report import Check, StartLog, StartReport, receive_report
from vllm_omni.tracing import flush_tracing, start_tracing

logger = logging.getLogger(__name__)

STOP_SECONDS = 10
"""After SIGTERM, a step may take so long to end; then the process is killed."""


class WorkerProcess:
    """A replica's process, from the server's side; it is starting.

    Args:
        config: What it serves.
        environment: All of its environment variables.
    """

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str]) -> None:
        self._stage = config.stage
        self._child = fork_server().fork(_main, config, environment=environment)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._child.sentinel

    @property
    def link(self) -> Connection:
        """Readable once it serves, or does not and has said why, or has ended."""
        return self._child.link

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.alive

    @property
    def exit_code(self) -> int | None:
        """How it ended: negative for a signal; None while it runs."""
        return self._child.exit_code

    def stop(self, timeout: float) -> None:
        """End it, by force when it has not ended after `timeout` seconds. Idempotent."""
        self._child.kill(signal.SIGTERM)
        self._child.stop(timeout)

    def kill(self) -> None:
        """End it at once."""
        self._child.kill()

    def wait_until_ready(self, timeout: float, check: Check) -> None:
        """Block until it serves; see `receive_report`.

        Raises:
            OmniConfigError: The deployment or the checkpoint is wrong.
            StartFailure: It did not start for any other reason.
        """
        report = receive_report(self._child, timeout, check)
        if report.misconfigured:
            raise OmniConfigError(f"stage {self._stage!r}: {report.reason}")
        report.raise_for_failure()


def _main(lifeline: Lifeline, config: WorkerConfig) -> None:
    """The process."""
    set_process_title(f"OmniDiffusion_{config.stage}")
    decorate_logs(f"OmniDiffusion_{config.stage}")
    stop_requested = _wake_on_sigterm()
    log = StartLog()
    try:
        if config.traces_endpoint is not None:
            start_tracing(config.traces_endpoint, config.stage)
        ranks = start_ranks(config)
        _check_fork(config.settings.device)
        worker = Worker(config, ranks)
    except Exception as error:
        # Whatever it is, the client gets to know, and this process ends.
        logger.error("Stage %s did not start:\n%s", config.stage, traceback.format_exc())
        report = log.failure(error, None, misconfigured=isinstance(error, OmniConfigError))
        lifeline.link.send_bytes(report.encode())
        return
    log.end()
    lifeline.link.send_bytes(StartReport().encode())
    try:
        worker.run([stop_requested.fileno(), lifeline.link.fileno(), lifeline.server])
    finally:
        worker.close()
        if config.traces_endpoint is not None:
            flush_tracing()
        # The client does this too, if it still can.
        shutil.rmtree(config.folder, ignore_errors=True)
        if config.deployment_id is not None and lifeline.server_gone:
            raze(config.deployment_id)


def _check_fork(device: str) -> None:
    """See that this process, which was forked, can use its device.

    Raises:
        OmniConfigError: It cannot, because the process that it comes from has used it.
    """
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        if "forked subprocess" not in str(error):  # torch.cuda._lazy_init
            raise
        raise OmniConfigError(
            f"{device} was used or looked for before stages were started, and processes that are "
            "forked after that cannot use it: import vllm_omni before diffusers and before "
            "`torch.cuda.is_available()` is called, make `Omni` before using the device, or set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1"
        ) from error


def _wake_on_sigterm() -> socket.socket:
    """A socket that becomes readable on SIGTERM; a step that does not end is killed after a while.

    SIGINT is left to the server: a terminal sends it to the whole process group.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.setblocking(False)

    def on_sigterm(number: int, frame: object) -> None:
        signal.alarm(STOP_SECONDS)  # its default action ends the process
        writer.close()

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_sigterm)
    return reader
