# SPDX-License-Identifier: Apache-2.0
"""The server's decoder processes: a few, started when they are needed.

A process that dies is replaced, and its file is tried once more: it may have died of the file
before. A file at which two die is refused.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from vllm import envs

from vllm_omni.errors import (
    FULL,
    OmniClientError,
    OmniError,
    OmniGenerateError,
    StorageFullError,
)
from vllm_omni.fork_server import (
    ForkServerGoneError,
    Lifeline,
    fork_server,
    receive_message,
    send_message,
)
from vllm_omni.media.containers import unreadable
from vllm_omni.media.decoder_process import CPU_S, decode_files, file_of
from vllm_omni.media.jobs import Answer, Job

logger = logging.getLogger(__name__)

FEWEST = 2
"""So that a long video does not keep everybody else waiting."""
SILENCE_S = 4 * CPU_S
"""A process that has not answered by then has been stopped."""
_ENDING_S = 5.0
_LIMITS = "VLLM_MAX_"
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_NUMBERS = "biuf"
_answers = msgspec.msgpack.Decoder(Answer)
_T = TypeVar("_T")


class DecoderDiedError(Exception):
    """A decoder process has ended with a file in hand.

    Attributes:
        exit_code: How; negative for a signal.
    """

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code

    @property
    def out_of_time(self) -> bool:
        """Whether it has used up its processor time."""
        return self.exit_code == -signal.SIGXCPU

    def error(self, kind: str, param: str) -> OmniError:
        """What to raise for the request."""
        if self.out_of_time:
            return OmniClientError(
                f"{param}: the {kind} takes more than {CPU_S} s to decode", param=param
            )
        if self.exit_code in [-number for number in _CRASHES]:
            return unreadable(kind, param, "its decoder crashed")
        return OmniGenerateError(f"{param}: the process that decoded the {kind} was ended")


class _Decoder:
    """A decoder process, from the server's side. Used by one thread at a time."""

    def __init__(self, target: Callable[[Lifeline], None]) -> None:
        limits = {name: value for name, value in os.environ.items() if name.startswith(_LIMITS)}
        self._child = fork_server().fork(target, environment=limits)
        self._channel = socket.socket(fileno=os.dup(self._child.link.fileno()))
        self._channel.settimeout(SILENCE_S)

    def ask(self, request: bytes, data: bytes) -> tuple[Answer, np.ndarray | None]:
        """Have it do a job on a file.

        Raises:
            DecoderDiedError: It has ended.
            OSError: There is no descriptor or no memory left here.
        """
        file = file_of(data)
        try:
            send_message(self._channel, request, [file])
            answer, files = receive_message(self._channel, 1)
        except (EOFError, ConnectionError, TimeoutError):
            self._child.stop(_ENDING_S)
            raise DecoderDiedError(self._child.exit_code) from None
        finally:
            os.close(file)
        return _received(_answers.decode(answer), files)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child.alive

    def end(self) -> None:
        """End it, whatever it does. Any thread may do so."""
        self._child.kill()
        self._child.join(_ENDING_S)

    def close(self) -> None:
        """Give back what belongs to it, once it has ended."""
        self._channel.close()
        self._child.stop(0)


def _received(answer: Answer, files: list[int]) -> tuple[Answer, np.ndarray | None]:
    try:
        if answer.shape is None:
            return answer, None
        if not files:
            raise OSError("no file descriptor is left for a decoded medium")
        return answer, _array(answer.shape, np.dtype(answer.dtype), files[0])
    finally:
        for file in files:
            os.close(file)


def _array(shape: tuple[int, ...], dtype: np.dtype, file: int) -> np.ndarray:
    """The array in a file, copied without Python's lock: to unmap it would take that for long."""
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if dtype.kind not in _NUMBERS or size != os.fstat(file).st_size:
        raise msgspec.ValidationError(f"not {size} bytes of numbers")
    array = np.empty(shape, dtype)
    bytes_ = memoryview(array.reshape(-1).view(np.uint8))
    read = 0
    while read < size:
        read += os.preadv(file, [bytes_[read:]], read)
    return array


class Decoders:
    """Decoder processes. Any thread may use them.

    Args:
        most: How many there may be; who comes when all are busy waits.
        target: What they run.
    """

    def __init__(self, most: int, target: Callable[[Lifeline], None] = decode_files) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._target = target
        self._lock = threading.Lock()
        self._idle: list[_Decoder] = []
        self._busy: set[_Decoder] = set()
        self._closed = False

    def run(self, job: Job[_T], data: bytes) -> tuple[_T, np.ndarray | None]:
        """Do a job on a file: what it says about the result, and the array if it makes one.

        Raises:
            OmniClientError: The file passes a limit, is broken, or ended two processes.
            ValueError: What a library says is wrong with the file.
            OmniGenerateError: Nothing could decode it.
        """
        request = msgspec.msgpack.encode(job)
        try:
            with self._places:
                answer, array = self._asked(job, request, data)
            about = None if answer.refusal else msgspec.msgpack.decode(answer.about, type=job.about)
        except DecoderDiedError as died:
            raise died.error(job.kind, job.param) from died
        except (OSError, ForkServerGoneError, msgspec.ValidationError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise StorageFullError(
                    f"{job.param}: there is no room to decode the {job.kind}"
                ) from error
            raise OmniGenerateError(f"{job.param}: cannot decode now: {error}") from error
        if answer.refusal is not None:
            answer.refusal.raise_it()
        return about, array

    def close(self) -> None:
        """End all of them; what they are at fails. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for decoder in [*idle, *busy]:
            decoder.end()
        for decoder in idle:
            decoder.close()

    def _asked(self, job: Job[_T], request: bytes, data: bytes) -> tuple[Answer, np.ndarray | None]:
        try:
            return self._ask(request, data)
        except DecoderDiedError as died:
            logger.warning("A decoder process ended over one %s (%s)", job.kind, died)
            if died.out_of_time:
                raise
        return self._ask(request, data)

    def _ask(self, request: bytes, data: bytes) -> tuple[Answer, np.ndarray | None]:
        decoder = self._taken()
        whole = False
        try:
            answered = decoder.ask(request, data)
            whole = True
        finally:
            self._give_back(decoder, whole)
        return answered

    def _taken(self) -> _Decoder:
        with self._lock:
            if self._closed:
                raise OmniGenerateError("the server is shutting down")
            while self._idle:
                decoder = self._idle.pop()
                if decoder.alive:
                    break
                decoder.close()
            else:
                decoder = _Decoder(self._target)
            self._busy.add(decoder)
            return decoder

    def _give_back(self, decoder: _Decoder, whole: bool) -> None:
        with self._lock:
            self._busy.remove(decoder)
            if whole and not self._closed:
                self._idle.append(decoder)
                return
        decoder.end()
        decoder.close()


_lock = threading.Lock()
_running: dict[int, Decoders] = {}
"""The decoders of this process, by pid, because a forked process inherits this variable."""


def decoders() -> Decoders:
    """Those of this process. None of them runs before it is needed."""
    pid = os.getpid()
    with _lock:
        if pid not in _running:
            _running.clear()
            cores = len(os.sched_getaffinity(0))
            _running[pid] = Decoders(max(FEWEST, min(cores, envs.VLLM_MEDIA_LOADING_THREAD_COUNT)))
        return _running[pid]


def close_decoders() -> None:
    """End those of this process, if there are any."""
    with _lock:
        ours = _running.pop(os.getpid(), None)
    if ours is not None:
        ours.close()
