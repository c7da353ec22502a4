# SPDX-License-Identifier: Apache-2.0
"""Starting and ending a replica's process.

A process is forked by a fork server: a child that has imported torch and this package and nothing
else. So it starts in a fraction of a second once the server runs, and unlike a fork of the serving
process it inherits no threads, event loops, sockets or locks. The environment (visible devices,
threads) is handed over and set before a device is touched. The server is multiprocessing's own: it
and its children end with the process that started it.
"""

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import traceback
from multiprocessing.connection import Connection, wait

from vllm_omni.diffusion.messages import Started, decode_started, encode
from vllm_omni.diffusion.worker import Worker, WorkerConfig, use_environment
from vllm_omni.errors import OmniConfigError

logger = logging.getLogger(__name__)

STOP_SECONDS = 10
"""After SIGTERM, a step may take so long to end; then the process is killed."""
_PR_SET_PDEATHSIG = 1
_START_METHOD = "forkserver"
_PRELOAD = ["vllm_omni.diffusion.process", "vllm_omni.diffusion.programs.code2wav"]


def prepare() -> None:
    """Start the fork server, which takes seconds, without waiting for it."""
    from multiprocessing import forkserver

    multiprocessing.get_context(_START_METHOD).set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


class WorkerProcess:
    """A replica's process, from the client's side. Blocks until it is ready.

    Raises:
        OmniConfigError: The deployment or the checkpoint is wrong.
        RuntimeError: It did not start for any other reason; carries the process's own message.
    """

    def __init__(self, config: WorkerConfig, timeout: float) -> None:
        prepare()
        context = multiprocessing.get_context(_START_METHOD)
        # The process ends when our end of this closes, whatever the reason.
        self._link, remote = context.Pipe()
        self._process = context.Process(
            target=_main, args=(config, remote), name=f"omni-{config.stage}", daemon=True
        )
        try:
            self._process.start()
        finally:
            remote.close()
        try:
            self._wait_until_ready(config.stage, timeout)
        except BaseException:
            self.stop(0)
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process has ended."""
        return self._process.sentinel

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """How it ended: negative for a signal; None while it runs."""
        return self._process.exitcode

    def stop(self, timeout: float) -> None:
        """End it, by force when it has not ended after `timeout` seconds. Idempotent."""
        self._link.close()
        if self.alive:
            self._process.terminate()
            self._process.join(timeout)
        if self.alive:
            self._process.kill()
        self._process.join()

    def _wait_until_ready(self, stage: str, timeout: float) -> None:
        ready = wait([self._link, self._process.sentinel], timeout)
        if not ready:
            raise RuntimeError(f"stage {stage!r} was not ready after {timeout:g} s")
        try:
            started = decode_started(self._link.recv_bytes())
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"stage {stage!r}: its process ended at start, exit code {self.exit_code}. It "
                "imports the main script, so a script that starts a pipeline does so under "
                '`if __name__ == "__main__":`'
            ) from None
        if started.error is not None:
            kind = OmniConfigError if started.misconfigured else RuntimeError
            raise kind(f"stage {stage!r}: {started.error}")


def _main(config: WorkerConfig, link: Connection) -> None:
    """The process."""
    _end_with_parent()
    stop_requested = _wake_on_sigterm()
    try:
        use_environment(config.environment)
        worker = Worker(config)
    except Exception as error:
        # Whatever it is, the client gets to know, and this process ends.
        logger.error("Stage %s did not start:\n%s", config.stage, traceback.format_exc())
        misconfigured = isinstance(error, OmniConfigError)
        text = str(error) if misconfigured else f"{type(error).__name__}: {error}"
        link.send_bytes(encode(Started(text, misconfigured)))
        return
    link.send_bytes(encode(Started()))
    try:
        worker.run([stop_requested.fileno(), link.fileno()])
    finally:
        worker.close()
        # The client does this too, if it still can.
        shutil.rmtree(config.folder, ignore_errors=True)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the fork server, and so its own parent, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _wake_on_sigterm() -> socket.socket:
    """A socket that becomes readable on SIGTERM; a step that does not end is killed after a while.

    SIGINT is left to the parent: a terminal sends it to the whole process group.
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
    os.set_inheritable(reader.fileno(), False)
    return reader
