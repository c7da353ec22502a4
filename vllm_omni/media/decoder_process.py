# SPDX-License-Identifier: Apache-2.0
"""A process that does nothing but decode: what is wrong with a file can end it, and only it.

It is forked by the fork server and so has every library already. It yields to the server, whose
event loop is more urgent, holds none of its keys in its environment, and has bounds on processor
time and memory. It ends when its link closes, and in the middle of a file when the server is gone.
"""

import os
import resource
import socket
import threading
from multiprocessing.connection import wait
from pathlib import Path

import msgspec
import numpy as np
from vllm.utils.system_utils import set_process_title

from vllm_omni.fork_server import Lifeline, receive_message, send_message
from vllm_omni.media.jobs import Answer, AnyJob, Refusal
from vllm_omni.media.limits import DEFAULT_LIMITS

NAME = "OmniDecoder"
CPU_S = 300
"""Processor time for one file. The largest video within the limits takes some 200 s."""
MEMORY_BYTES = 2 * DEFAULT_LIMITS.max_decoded_bytes + (1 << 30)
"""What it may have besides what it was forked with: everything that was decoded, and once more."""
_NICENESS = 10
"""A tenth of a share: beside busy engines a picture still comes, and the event loop goes first."""
_jobs = msgspec.msgpack.Decoder(AnyJob)


def decode_files(lifeline: Lifeline) -> None:
    """The process."""
    set_process_title(NAME)
    threading.Thread(target=_end_with, args=(lifeline.server,), daemon=True).start()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _bound(resource.RLIMIT_DATA, _private_bytes() + MEMORY_BYTES)
    with socket.socket(fileno=os.dup(lifeline.link.fileno())) as channel:
        while True:
            try:
                request, (file,) = receive_message(channel, 1)
            except (EOFError, ConnectionError):
                return
            _bound(resource.RLIMIT_CPU, int(_cpu_seconds()) + CPU_S)
            answer, array = _run(_jobs.decode(request), _contents(file))
            _send(channel, answer, array)


def _end_with(server: int) -> None:
    wait([server])
    os._exit(0)


def _run(job: AnyJob, data: bytes) -> tuple[Answer, np.ndarray | None]:
    try:
        about, array = job.run(data)
    except Exception as error:  # the libraries' errors have no common base; the server gets it
        return Answer(refusal=Refusal.of(error)), None
    said = msgspec.Raw(msgspec.msgpack.encode(about))
    if array is None:
        return Answer(about=said), None
    return Answer(about=said, shape=array.shape, dtype=array.dtype.str), array


def _send(channel: socket.socket, answer: Answer, array: np.ndarray | None) -> None:
    payload = msgspec.msgpack.encode(answer)
    if array is None:
        send_message(channel, payload, [])
        return
    file = file_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    try:
        send_message(channel, payload, [file])
    finally:
        os.close(file)


def file_of(data: bytes | np.ndarray) -> int:
    """The descriptor of a file in memory with these bytes: it has no name, so nothing is left.

    Raises:
        OSError: There is no descriptor or no memory left.
    """
    file = os.memfd_create("media", os.MFD_CLOEXEC)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    except BaseException:
        os.close(file)
        raise
    return file


def _contents(file: int) -> bytes:
    with os.fdopen(file, "rb") as opened:
        opened.seek(0)
        return opened.read()


def _bound(what: int, limit: int) -> None:
    _, most = resource.getrlimit(what)
    resource.setrlimit(what, (limit if most < 0 else min(limit, most), most))


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _private_bytes() -> int:
    """What counts towards RLIMIT_DATA."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmData:")]
    return int(line.split()[1]) << 10
