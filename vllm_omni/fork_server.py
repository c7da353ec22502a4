# SPDX-License-Identifier: Apache-2.0
"""Processes of stages, forked by a process that does nothing else.

A stage's process needs vLLM, torch and the model classes: 15 to 20 s of imports where a process is
spawned, nothing where it is forked from one that has them. A server that runs must not fork: a
child would inherit its client connections, and the locks and thread pools of threads that it does
not have. So the server forks once, early, while it has neither, and that child forks every stage's
process from then on, those that replace dead ones included.

Python's own `multiprocessing.forkserver` is a new interpreter, which would import everything again.

A child ends when its server does: it is given a link that closes with the server's process, and a
pidfd of that process, because a copy of the link may live on in a process that a user forked.
"""

import contextlib
import importlib
import os
import signal
import socket
import stat
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from vllm.utils.system_utils import set_process_title

_HEADER = struct.Struct("!I")
_STATUS = struct.Struct("!i")
_STDERR = 2
_TOLD_S = 0.2
"""How long the exit code of a process that has ended may be on its way."""


IMPORT_S = 300.0
"""How long a new interpreter may take to import what this one has."""
ANSWER_S = 30.0
"""How long the process that forks may take to answer: it does so in milliseconds."""


class ForkServerGoneError(RuntimeError):
    """The process that forks stages' processes has been killed, or does not answer: no stage can be
    started."""


@dataclass(frozen=True, slots=True)
class Lifeline:
    """What ties a forked process to the server.

    Attributes:
        link: The other end of `Child.link`.
        server: A pidfd of the server, readable once that has ended.
    """

    link: Connection
    server: int

    @property
    def server_gone(self) -> bool:
        """Whether the server has ended: a moment after its end of the link has closed."""
        return bool(wait([self.server], _TOLD_S))


Target = Callable[..., None]
"""Called in the new process as `target(lifeline, *args)`; must be importable."""


class Child:
    """A forked process, from the server's side. Any thread may use it.

    Its descriptors are closed with the object, never before: an event loop may still watch one.

    Attributes:
        pid: Its process id.
        link: For messages to it and from it. Closing it asks it to end.
        sentinel: File descriptor that is readable once the process has ended.
    """

    def __init__(self, pid: int, link: Connection, sentinel: int, status: int) -> None:
        self.pid = pid
        self.link = link
        self.sentinel = sentinel
        self._status = status
        self._exit_code: int | None = None
        self._reading = threading.Lock()
        weakref.finalize(self, _close_all, sentinel, status)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return not self.join(0)

    @property
    def exit_code(self) -> int | None:
        """How it ended: negative for a signal; None while it runs or if nobody could tell."""
        if self.alive:
            return None
        with self._reading:
            if self._exit_code is None and wait([self._status], _TOLD_S):
                told = os.read(self._status, _STATUS.size)
                self._exit_code = _STATUS.unpack(told)[0] if told else None
            return self._exit_code

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end, at most `timeout` seconds; whether it has ended."""
        return bool(wait([self.sentinel], timeout))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal. Nothing happens if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def stop(self, timeout: float) -> None:
        """End it, by force when it has not ended after `timeout` seconds. Idempotent."""
        self.link.close()
        if not self.join(timeout):
            self.kill()
            self.join()


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class ForkServer:
    """The process that forks. Made before the server has connections.

    Args:
        fresh: It is a new interpreter and no fork of this process, of which something is in the way
            (a GPU's driver, once in use, is of no use to a fork). It takes as long as its imports.

    Raises:
        ForkServerGoneError: The new interpreter did not get that far.
    """

    def __init__(self, fresh: bool = False) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        server = os.getpid()
        with theirs:
            if fresh:
                self.pid = _start_afresh(theirs, server)
            else:
                with _one_thread():
                    self.pid = _fork_afresh(lambda: _Forker(theirs, server).run())
        if fresh:
            self._control.settimeout(IMPORT_S)
            try:
                receive_message(self._control, 0)
            except (OSError, EOFError) as error:
                self.close()
                raise ForkServerGoneError(
                    f"the process that forks stages' processes (pid {self.pid}) did not start"
                ) from error
        self._control.settimeout(ANSWER_S)

    def fork(self, target: Target, *args: Any, environment: Mapping[str, str]) -> Child:
        """Run `target(lifeline, *args)` in a new process with exactly this environment.

        Raises:
            ForkServerGoneError: There is nobody to fork it.
        """
        ours, theirs = socket.socketpair()
        request = bytes(ForkingPickler.dumps((dict(environment), target, args)))
        with self._lock, theirs:
            try:
                send_message(self._control, request, [theirs.fileno()])
                answer, (sentinel, status) = receive_message(self._control, 2)
            except (OSError, ValueError, EOFError) as error:
                ours.close()
                self._control.close()  # an answer that is late would be taken for the next one's
                what = "does not answer" if isinstance(error, TimeoutError) else "is gone"
                raise ForkServerGoneError(
                    f"the process that forks stages' processes (pid {self.pid}) {what}"
                ) from error
        (pid,) = _STATUS.unpack(answer)
        return Child(pid, Connection(ours.detach()), sentinel, status)

    def close(self) -> None:
        """End it. What it has forked goes on."""
        self._control.close()
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # one that was stopped could not end
            os.waitpid(self.pid, 0)


_running: dict[int, ForkServer] = {}
"""The fork server of this process, by pid, because a forked process inherits this variable."""


def fork_server(fresh: bool = False) -> ForkServer:
    """This process's fork server, started when it is first asked for.

    Import what the children are to have before that.

    Args:
        fresh: See `ForkServer`; of no effect if there is one already.
    """
    pid = os.getpid()
    if pid not in _running:
        _running.clear()
        _running[pid] = ForkServer(fresh)
    return _running[pid]


class _Forker:
    """The loop of the process that forks. One thread, no state but its children."""

    def __init__(self, control: socket.socket, server: int) -> None:
        self._control = control
        self._children: dict[int, tuple[int, int]] = {}
        """By pidfd: the process id, and the pipe that its exit code goes to."""
        self._server = os.pidfd_open(server)

    def run(self) -> None:
        """Serve until the server is gone."""
        set_process_title("OmniForkServer")
        # A terminal's Ctrl+C is for the server to act on. Not a session: Linux shares processors
        # among sessions first (autogroups), and niceness counts only within one.
        os.setpgid(0, 0)
        # With `stty tostop` a group in the background is stopped when it writes to the terminal.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        _close_sockets(keep={self._control.fileno(), _STDERR})
        while True:
            ready = wait([self._control, self._server, *self._children])
            for pidfd in self._children.keys() & set(ready):
                self._reap(pidfd)
            if self._server in ready:
                return
            if self._control in ready:
                try:
                    request, (link,) = receive_message(self._control, 1)
                except EOFError:
                    return
                self._fork(request, link)

    def _fork(self, request: bytes, link: int) -> None:
        status_reader, status_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(status_reader)
            os.close(status_writer)
            run_and_exit(lambda: self._become(request, link))
        os.close(link)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, status_writer)
        send_message(self._control, _STATUS.pack(pid), [pidfd, status_reader])
        os.close(status_reader)

    def _reap(self, pidfd: int) -> None:
        pid, status_writer = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # The server may not care any more.
            os.write(status_writer, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(status_writer)
        os.close(pidfd)

    def _become(self, request: bytes, link: int) -> None:
        """Turn this process, just forked, into what the request asks for."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._control.close()
        for pidfd, (_, status_writer) in self._children.items():
            os.close(pidfd)
            os.close(status_writer)
        environment: Mapping[str, str]
        environment, target, args = ForkingPickler.loads(request)  # from our own server process
        _use_environment(environment)
        target(Lifeline(Connection(link), self._server), *args)


def _start_afresh(control: socket.socket, server: int) -> int:
    """Start a new interpreter that forks; gives its process id."""
    control.set_inheritable(True)
    own = sorted(name for name in sys.modules if name.partition(".")[0] == "vllm_omni")
    # -P: a module in the folder where one happens to stand is not taken for Python's own. Not -m:
    # messages name classes of this module, which then would not be those of `__main__`.
    code = f"import sys, {__name__} as forking; forking.serve_afresh(*sys.argv[1:])"
    arguments = [sys.executable, "-P", "-c", code, str(control.fileno()), str(server), *own]
    # What this process finds on its path, the other one does too.
    path = os.pathsep.join(_folders(sys.path))
    return os.posix_spawn(sys.executable, arguments, {**os.environ, "PYTHONPATH": path})


def _folders(path: Sequence[object]) -> Iterator[str]:
    """The entries that Python heeds; the empty one is the current folder, if there still is one."""
    for entry in path:
        if isinstance(entry, str):
            with contextlib.suppress(FileNotFoundError):
                yield entry or os.getcwd()


def serve_afresh(control: str, server: str, *modules: str) -> None:
    """What a new interpreter that forks does.

    Args:
        control: File descriptor of its end of the channel to the server.
        server: The server's process id.
        modules: What the server has imported of this package.
    """
    channel = socket.socket(fileno=int(control))
    for name in modules:
        importlib.import_module(name)
    torch.set_num_threads(1)
    send_message(channel, b"", [])
    run_and_exit(_Forker(channel, int(server)).run)


def _fork_afresh(run: Callable[[], None]) -> int:
    """Fork a child that runs and exits; gives its process id.

    A thread that has used OpenMP (torch does) has a pool of threads which a fork does not inherit:
    its child would wait for them for good as soon as it uses more than one. So the fork is that of
    a new thread, which is the child's only one.
    """
    pid = 0

    def fork() -> None:
        nonlocal pid
        pid = os.fork()
        if pid == 0:
            run_and_exit(run)

    thread = threading.Thread(target=fork, name="fork")
    thread.start()
    thread.join()
    return pid


def run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run, then end this forked process with the exit code that an interpreter would give.

    Its exit handlers are not run: they are its parent's.
    """
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _use_environment(environment: Mapping[str, str]) -> None:
    """Make this process's environment the given one, and have torch heed it."""
    os.environ.clear()
    os.environ.update(environment)
    # Read at import otherwise, which in a forked process is long past.
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread: a fork inherits a thread pool without its threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _close_sockets(keep: set[int]) -> None:
    """Close inherited sockets, so that a port which the server closes is closed."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor <= _STDERR or descriptor in keep:
            continue
        with contextlib.suppress(OSError):  # The listing's own descriptor is closed by now.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def send_message(channel: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    """Send bytes and file descriptors. The receiver has to know how many of these there can be.

    Raises:
        OSError: The other end is closed.
    """
    socket.send_fds(channel, [_HEADER.pack(len(payload))], descriptors)
    channel.sendall(payload)


def receive_message(channel: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """What `send_message` sent: the bytes, and at most so many descriptors, which are now yours.

    Raises:
        EOFError: The other end is closed.
        OSError: There is no descriptor left in this process, or the connection broke.
    """
    header, found, _, _ = socket.recv_fds(channel, _HEADER.size, descriptors)
    if len(header) < _HEADER.size:
        raise EOFError("closed")
    size = _HEADER.unpack(header)[0]
    payload = bytearray()
    while len(payload) < size:
        if not (part := channel.recv(size - len(payload))):
            raise EOFError("closed")
        payload += part
    return bytes(payload), found
