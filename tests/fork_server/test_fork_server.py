# SPDX-License-Identifier: Apache-2.0
"""Forked processes: what they inherit, how they end, and how the server gets to know."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from multiprocessing.connection import wait
from pathlib import Path

import psutil
import pytest

from vllm_omni import fork_server as module
from vllm_omni.fork_server import (
    Child,
    ForkServer,
    ForkServerGoneError,
    Lifeline,
    fork_server,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

WAIT_S = 10


def report(lifeline: Lifeline, *args: object) -> None:
    """Say what this process sees, then wait to be ended."""
    lifeline.link.send((args, dict(os.environ), threading.active_count(), os.getppid()))
    wait([lifeline.link, lifeline.server])


def fail(lifeline: Lifeline) -> None:
    raise ValueError("as it should")


def leave(lifeline: Lifeline, code: int) -> None:
    sys.exit(code)


def ignore_everything(lifeline: Lifeline) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lifeline.link.send("ready")
    signal.pause()


def ended(child: Child) -> int | None:
    assert child.join(WAIT_S)
    return child.exit_code


def test_a_child_gets_its_arguments_and_exactly_its_environment() -> None:
    child = fork_server().fork(report, 1, "two", environment={"ONLY": "this"})
    args, environment, threads, parent = child.link.recv()
    assert args == (1, "two")
    assert environment == {"ONLY": "this"}
    assert threads == 1
    assert parent == fork_server().pid
    assert child.alive and child.exit_code is None
    child.stop(WAIT_S)
    assert not child.alive and child.exit_code == 0


def test_a_terminal_does_not_reach_it_but_niceness_counts() -> None:
    """A-30e; in another session niceness would not count beside the server (autogroups)."""
    child = fork_server().fork(report, environment={})
    child.link.recv()
    assert os.getpgid(child.pid) == os.getpgid(fork_server().pid) != os.getpgid(0)
    assert os.getsid(child.pid) == os.getsid(0)
    child.stop(WAIT_S)


@pytest.mark.parametrize("target, args, code", [(fail, (), 1), (leave, (7,), 7), (leave, (0,), 0)])
def test_exit_codes(target: object, args: tuple[object, ...], code: int) -> None:
    child = fork_server().fork(target, *args, environment=os.environ)  # type: ignore[arg-type]
    assert ended(child) == code
    with pytest.raises(EOFError):
        child.link.recv()
    child.stop(0)
    assert child.exit_code == code, "known after it has been stopped"


def test_a_killed_child_is_noticed() -> None:
    child = fork_server().fork(report, environment=os.environ)
    child.link.recv()
    os.kill(child.pid, signal.SIGKILL)
    assert wait([child.sentinel], WAIT_S)
    assert child.exit_code == -signal.SIGKILL
    child.stop(0)
    child.stop(0)
    child.kill()


def test_a_child_that_does_not_end_is_killed() -> None:
    child = fork_server().fork(ignore_everything, environment=os.environ)
    child.link.recv()
    child.stop(0.1)
    assert child.exit_code == -signal.SIGKILL


def test_children_end_independently_of_each_other() -> None:
    children = [fork_server().fork(report, i, environment=os.environ) for i in range(4)]
    for child in children:
        child.link.recv()
    for child in children[::2]:
        child.link.close()
        assert ended(child) == 0
    for child in children[1::2]:
        assert child.alive, "a sibling's copy of the link would have kept the others alive"
    for child in children:
        child.stop(WAIT_S)


def test_no_socket_is_inherited() -> None:
    """A port that the server closes is closed, whatever its children do."""
    child = fork_server().fork(report, environment=os.environ)
    child.link.recv()
    inherited = psutil.Process(child.pid).net_connections(kind="inet")
    assert inherited == []
    child.stop(WAIT_S)


def test_forks_from_many_threads() -> None:
    made: list[Child] = []

    def fork(number: int) -> None:
        made.append(fork_server().fork(report, number, environment={}))

    threads = [threading.Thread(target=fork, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    numbers = {child.link.recv()[0] for child in made}
    assert len(numbers) == len({child.pid for child in made}) == 8
    for child in made:
        child.stop(WAIT_S)


PARENT = textwrap.dedent(
    """
    import os, signal, socket, sys
    from tests.fork_server.test_fork_server import report
    from vllm_omni.fork_server import ForkServerGoneError, fork_server
    listening = socket.create_server(("127.0.0.1", 0))
    child = fork_server().fork(report, environment=os.environ)
    child.link.recv()
    print(child.pid, fork_server().pid, listening.getsockname()[1], flush=True)
    for line in sys.stdin:
        if line == "lose\\n":
            os.kill(fork_server().pid, signal.SIGKILL)
            try:
                fork_server().fork(report, environment=os.environ)
            except ForkServerGoneError as error:
                print(child.alive, error, flush=True)
        if line == "close\\n":
            listening.close()
            print("closed", flush=True)
    """
)


class Parent:
    """A server of its own, to be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self.child, self.forker, self.port = map(int, self.ask("").split())

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        if command:
            print(command, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_everything_ends_with_a_killed_server() -> None:
    parent = Parent()
    family = [psutil.Process(parent.child), psutil.Process(parent.forker)]
    assert parent.ask("close") == "closed\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", parent.port))
    parent.end()
    _, alive = psutil.wait_procs(family, WAIT_S)
    assert not alive


def test_a_killed_fork_server_takes_nobody_with_it() -> None:
    """What runs goes on; nothing new can be started, which is a clear error."""
    parent = Parent()
    try:
        assert parent.ask("lose").startswith("True the process that forks")
    finally:
        child = psutil.Process(parent.child)
        parent.end()
    _, alive = psutil.wait_procs([child], WAIT_S)
    assert not alive


def test_a_frozen_fork_server_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who asks first nor whoever comes after; and it ends when it goes on."""
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    server = ForkServer()
    frozen = psutil.Process(server.pid)
    frozen.suspend()
    try:
        with pytest.raises(ForkServerGoneError, match="does not answer"):
            server.fork(leave, 0, environment=os.environ)
        with pytest.raises(ForkServerGoneError, match="is gone"):
            server.fork(leave, 0, environment=os.environ)
    finally:
        server.close()
    assert not psutil.pid_exists(server.pid)


THREADED = textwrap.dedent(
    """
    import os, sys, torch
    torch.set_num_threads(2)
    torch.randn(2_000_000).exp().sum()
    from vllm_omni.fork_server import fork_server
    def compute(lifeline):
        torch.set_num_threads(2)
        torch.randn(2_000_000).exp().sum()
    child = fork_server().fork(compute, environment=dict(os.environ))
    sys.exit(not child.join(20) or child.exit_code)
    """
)


def test_who_has_computed_with_torch_can_start_stages() -> None:
    """A thread pool's threads are not inherited: a child that waited for them would never end."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", THREADED], env=environment, check=True, timeout=60)


def test_a_fresh_one_is_no_fork() -> None:
    """What this process has done (to a GPU's driver, say) is not done in what it starts."""
    module.DONE_HERE = True
    made = ForkServer(fresh=True)
    try:
        child = made.fork(tell_what_was_done, 3, environment={"ONLY": "this"})
        assert child.link.recv() == (3, False, {"ONLY": "this"}, made.pid)
        child.stop(WAIT_S)
        assert child.exit_code == 0
    finally:
        del module.DONE_HERE
        made.close()
    assert not psutil.pid_exists(made.pid)


def tell_what_was_done(lifeline: Lifeline, number: int) -> None:
    lifeline.link.send((number, "DONE_HERE" in vars(module), dict(os.environ), os.getppid()))
    wait([lifeline.link, lifeline.server])


def test_a_fresh_one_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni.is_not_there", module)
    with pytest.raises(ForkServerGoneError, match="did not start"):
        ForkServer(fresh=True)


def test_a_fresh_one_takes_its_modules_from_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), tmp_path])  # no string: not heeded
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    ForkServer(fresh=True).close()
