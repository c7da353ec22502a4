# SPDX-License-Identifier: Apache-2.0
"""Why a stage's process did not start, told to the server by that process.

The reason is what the process logged with a traceback, or raised; with it come the last lines of
its log. Without this a user reads "Engine core initialization failed. See root cause above" and
looks through the mixed logs of all stages.
"""

import fcntl
import logging
import mmap
import os
import signal
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from vllm_omni.errors import OmniError
from vllm_omni.fork_server import Child

Check = Callable[[], None]

KEPT_LINES = 20
POLL_S = 0.1
ENDING_S = 5.0
_MAX_BYTES = 64 << 10
START_LOG = "VLLM_OMNI_START_LOG"
"""Environment variable: the file of a `StartLog` that spawned processes share."""
_DEPTH = "VLLM_OMNI_START_DEPTH"
_HEADER = struct.Struct("<II")
"""Of a page: how long the report is, and the depth of the process that it is of."""


class StartFailure(OmniError, RuntimeError):
    """A stage's process did not start.

    Attributes:
        reason: Why, in a line.
        log: The last lines of its log.
    """

    def __init__(self, reason: str, log: tuple[str, ...] = ()) -> None:
        tail = "".join(f"\n    {line}" for line in log)
        super().__init__(reason + (f"\n  the last lines of its log:{tail}" if tail else ""))
        self.reason = reason
        self.log = log

    @classmethod
    def ended(cls, exit_code: int | None) -> Self:
        """Of a process that ended without a word."""
        return cls(f"its process {_how_it_ended(exit_code)}")


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's process says once it is ready, or has failed.

    Attributes:
        pid: The process that computes.
        reason: Why it failed; None if it did not.
        misconfigured: The deployment or the checkpoint is at fault.
        log: The last lines of its log, if it failed.
    """

    pid: int = 0
    reason: str | None = None
    misconfigured: bool = False
    log: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """For `decode`, in another process."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """What `encode` made."""
        return msgspec.msgpack.decode(data, type=cls)

    def raise_for_failure(self) -> None:
        """Raise `StartFailure` if it failed."""
        if self.reason is not None:
            raise StartFailure(self.reason, self.log)


def receive_report(child: Child, timeout: float, check: Check) -> StartReport:
    """Wait until a process says that it is ready, or why not.

    Args:
        child: The process.
        timeout: Seconds that it may take.
        check: Called meanwhile, ten times a second; what it raises ends the wait.

    Raises:
        StartFailure: It has ended, or said nothing in time.
    """
    deadline = time.monotonic() + timeout
    while not child.link.poll(POLL_S):
        check()
        if time.monotonic() > deadline:
            raise StartFailure(f"it was not ready after {timeout:g} s")
    try:
        return StartReport.decode(child.link.recv_bytes())
    except EOFError:
        child.join(ENDING_S)
        raise StartFailure.ended(child.exit_code) from None


class StartLog:
    """Keeps the last log lines of this process and those that it starts, and what they raised.

    It sees records where they are made, for an engine core configures its loggers anew and drops
    their handlers. The processes share a page of memory, since the one that fails cannot answer.
    What a process that was started here raised is the cause of what this one raises later on, and
    stays: an engine core says of its ranks no more than that one failed.

    Args:
        path: A file for the page, which processes that are spawned share too (`join_start_log`);
            None for those alone that are forked.
        depth: How many processes this one was started by since the page is there.
    """

    def __init__(self, path: Path | None = None, depth: int = 0) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._depth = depth
        self._file = _page(path)
        self._shared = mmap.mmap(self._file, _MAX_BYTES)
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._noted)
        _logs.append(self)

    def _noted(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make_record(*args, **kwargs)
        first, *more = record.getMessage().splitlines() or [""]
        self._lines.append(f"{record.levelname} {first[:300]}" + (" [...]" if more else ""))
        if record.exc_info and (error := record.exc_info[1]) is not None:
            self._write(StartReport(reason=describe(error), log=tuple(self._lines)))
        return record

    def end(self) -> None:
        """Note no more in this process."""
        logging.setLogRecordFactory(self._make_record)

    def failure(
        self, error: BaseException, exit_code: int | None, *, misconfigured: bool = False
    ) -> StartReport:
        """What to tell the server: what a forked process raised, else what this one did."""
        if told := self._read():
            return told
        reason = describe(error) if exit_code is None else f"its process {_how_it_ended(exit_code)}"
        return StartReport(reason=reason, misconfigured=misconfigured, log=tuple(self._lines))

    def deepen(self) -> None:
        """Be the log of a process that was forked from the one that had it."""
        self._depth += 1

    def _write(self, report: StartReport) -> None:
        data = report.encode()
        if len(data) > _MAX_BYTES - _HEADER.size:
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # ranks fail together
        try:
            size, depth = _HEADER.unpack_from(self._shared)
            if not size or depth <= self._depth:
                _HEADER.pack_into(self._shared, 0, len(data), self._depth)
                self._shared[_HEADER.size : _HEADER.size + len(data)] = data
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self) -> StartReport | None:
        size, _ = _HEADER.unpack_from(self._shared)
        return StartReport.decode(self._shared[_HEADER.size :][:size]) if size else None


_logs: list[StartLog] = []
"""Those of this process, with what it has inherited by being forked."""


def join_start_log() -> None:
    """In a process that was spawned: note for whoever started it. Nothing in others."""
    path = os.environ.get(START_LOG)
    if path is not None and not _logs and Path(path).exists():
        depth = int(os.environ.get(_DEPTH, "0")) + 1
        os.environ[_DEPTH] = str(depth)
        StartLog(Path(path), depth)


def _deepen() -> None:
    for log in _logs:
        log.deepen()


os.register_at_fork(after_in_child=_deepen)


def _page(path: Path | None) -> int:
    """A file of the page's size, open for as long as the process lives."""
    if path is None:
        file = os.memfd_create("start-log")
    else:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(file, _MAX_BYTES)
    return file


def no_check() -> None:
    """For who waits undisturbed."""


def describe(error: BaseException) -> str:
    """What an error says: in a line and with its type, unless it is one of ours."""
    if isinstance(error, OmniError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (the kernel does that when memory is short)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
