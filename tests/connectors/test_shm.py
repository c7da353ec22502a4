# SPDX-License-Identifier: Apache-2.0
"""The shared-memory connector with real files, threads, processes and signals."""

import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.segments import raze, sweep, sweep_stale
from vllm_omni.connectors.shm import SharedMemoryConnector, SharedMemoryOptions
from vllm_omni.handles import TensorHandle

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]
fork = multiprocessing.get_context("fork")
PAYLOAD = {"hidden": torch.arange(12, dtype=torch.float32).reshape(3, 4), "n": torch.tensor(3)}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory of its own on /dev/shm, so that mapping and removing are the real thing."""
    path = Path(f"/dev/shm/test-{os.getpid()}-{tmp_path.name}")
    path.mkdir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


@pytest.fixture
def connect(directory: Path) -> Iterator[Callable[..., SharedMemoryConnector]]:
    made: list[SharedMemoryConnector] = []

    def make(deployment_id: str = "d", **options: object) -> SharedMemoryConnector:
        made.append(
            SharedMemoryConnector(
                deployment_id, SharedMemoryOptions(directory=str(directory), **options)
            )
        )
        return made[-1]

    yield make
    for connector in made:
        connector.close()


def files(directory: Path) -> list[str]:
    """The segments, without lock files."""
    return [path.name for path in directory.iterdir() if not path.name.endswith("-lock")]


def put(connector: SharedMemoryConnector, request_id: str, suffix: str = "0") -> TensorHandle:
    result = connector.put("a", "b", make_key(request_id, suffix), PAYLOAD)
    assert result.ok
    assert result.handle is not None
    assert result.size == result.handle.nbytes
    return result.handle


def get(connector: SharedMemoryConnector, handle: TensorHandle) -> dict[str, torch.Tensor]:
    return connector.get("a", "b", handle.key, handle)


def test_written_once_read_once_then_gone(connect, directory: Path) -> None:
    writer, reader = connect(), connect()
    handle = put(writer, "r")
    (path,) = files(directory)
    assert (directory / path).stat().st_mode & 0o777 == 0o600
    assert (directory / path).stat().st_size == handle.nbytes

    result = get(reader, handle)

    assert files(directory) == []
    assert torch.equal(result["hidden"], PAYLOAD["hidden"])
    assert result["n"].item() == 3
    with pytest.raises(KeyError, match="r/0"):
        get(reader, handle)
    result["hidden"].zero_()  # The views are the reader's own.


@pytest.mark.parametrize("rows", [3, 16_000, 100_000])
def test_views_outlive_the_connector(connect, directory: Path, rows: int) -> None:
    connector = connect()
    payload = {"hidden": torch.rand(rows, 2), "last": torch.tensor(7)}
    handle = connector.put("a", "b", make_key("r", "0"), payload).handle
    assert handle is not None
    result = get(connector, handle)
    connector.close()
    assert list(directory.iterdir()) == []
    assert torch.equal(result["hidden"], payload["hidden"])
    del result["hidden"]
    assert result["last"].item() == 7


@pytest.mark.parametrize("nbytes", [0, 10, 60_000, 70_000, 1 << 40])
def test_a_handle_of_the_wrong_size_is_a_value_error_or_harmless(connect, nbytes: int) -> None:
    connector = connect()
    handle = TensorHandle(put(connector, "r").key, nbytes)
    if nbytes >= 65_536:  # Mapped: the file itself says how long it is.
        assert get(connector, handle)["n"].item() == 3
    else:
        with pytest.raises(ValueError, match="payload"):
            get(connector, handle)


def test_a_key_is_stored_once(connect, directory: Path) -> None:
    writer, other = connect(), connect()
    handle = put(writer, "r")
    for connector in (writer, other):
        with pytest.raises(ValueError, match="stored already"):
            put(connector, "r")
    other.close()
    assert get(writer, handle)
    assert get(writer, put(writer, "r"))  # Free again after the read.


def test_keys_need_a_request(connect, directory: Path) -> None:
    connector = connect()
    with pytest.raises(ValueError, match="make_key"):
        connector.put("a", "b", "bare", PAYLOAD)
    assert files(directory) == []


def test_inline_only_when_enabled_and_small(connect, directory: Path) -> None:
    default = connect()
    assert put(default, "r").inline is None
    assert default.health() == {
        "status": "ok",
        "inline_writes": 0,
        "shm_writes": 1,
        "bytes": (directory / files(directory)[0]).stat().st_size,
        "gets": 0,
        "cleanups": 0,
        "full": 0,
    }
    default.cleanup("r")

    inline = connect(inline_small_payloads=True)
    handle = put(inline, "r")
    assert files(directory) == []
    for _ in range(2):  # It owns nothing, so it can be read again.
        assert torch.equal(get(inline, handle)["hidden"], PAYLOAD["hidden"])
    inline.put("a", "b", make_key("r", "1"), {"x": torch.zeros(65536, dtype=torch.uint8)})
    assert len(files(directory)) == 1
    health = inline.health()
    assert (health["inline_writes"], health["shm_writes"], health["gets"]) == (1, 1, 2)


def test_discard(connect, directory: Path) -> None:
    connector = connect()
    handle = put(connector, "r")
    connector.discard(handle)
    connector.discard(handle)
    assert files(directory) == []


HOSTILE = ["r", "r/0", "r/", "", "../../etc/passwd", "a" * 100_000, "é漢\ud800", "\0", "r-0", "*"]


def test_cleanup_frees_exactly_one_request_from_another_instance(connect, directory: Path) -> None:
    writer, other = connect(), connect()
    handles = {name: [put(writer, name, s) for s in ("0", "1")] for name in HOSTILE}
    assert len(files(directory)) == 2 * len(HOSTILE)
    for done, name in enumerate(HOSTILE, 1):
        assert other.cleanup(name) == 2
        assert other.cleanup(name) == 0
        assert len(files(directory)) == 2 * (len(HOSTILE) - done)
        with pytest.raises(KeyError):
            get(other, handles[name][0])
    assert other.health()["cleanups"] == 2 * len(HOSTILE)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_requests_are_told_apart(one: str, two: str) -> None:
    connector = SharedMemoryConnector("hypothesis")
    put(connector, one, "0")
    if two != one:
        put(connector, two, "0")
    assert connector.cleanup(one) == 1
    assert connector.cleanup(two) == int(two != one)
    connector.close()


def test_close_frees_own_unread_segments_only(connect, directory: Path) -> None:
    one, two = connect(), connect()
    put(one, "r1")
    handle = put(two, "r2")
    one.close()
    one.close()
    assert len(files(directory)) == 1
    assert one.health()["status"] == "closed"
    with pytest.raises(RuntimeError, match="closed"):
        put(one, "r3")
    assert get(two, handle)
    two.close()
    assert list(directory.iterdir()) == []


def test_memory_of_the_writer_does_not_grow(connect, directory: Path) -> None:
    writer, reader = connect(), connect()
    unread = put(writer, "first")
    for number in range(2100):
        get(reader, put(writer, str(number)))
    assert len(writer._owned) <= 1100
    writer.close()
    assert files(directory) == []
    with pytest.raises(KeyError):
        get(reader, unread)


def test_many_threads(connect, directory: Path) -> None:
    connector = connect()

    def work(worker: int) -> int:
        total = 0
        for number in range(40):
            key = make_key(f"request {worker}", str(number))
            handle = connector.put("a", "b", key, {"x": torch.full((50,), worker)}).handle
            assert handle is not None
            total += int(connector.get("a", "b", key, handle)["x"].sum())
        return total

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [40 * 50 * worker for worker in range(8)]
    assert files(directory) == []
    assert connector.health()["gets"] == connector.health()["shm_writes"] == 320


def test_exactly_one_of_racing_readers_gets_it(connect) -> None:
    connector = connect()
    for number in range(20):
        handle = put(connector, str(number))
        barrier = threading.Barrier(4)

        def read(handle: TensorHandle = handle, barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            try:
                return len(get(connector, handle))
            except KeyError:
                return 0

        with ThreadPoolExecutor(4) as pool:
            assert sorted(f.result() for f in [pool.submit(read) for _ in range(4)]) == [0, 0, 0, 2]


def _produce(connector: SharedMemoryConnector, worker: int, handles) -> None:
    for number in range(30):
        handles.put(put(connector, f"w{worker}", str(number)))
    handles.close()
    handles.join_thread()


def test_many_processes_over_a_fork(connect, directory: Path) -> None:
    connector = connect()
    kept = put(connector, "parent")
    handles = fork.Queue()
    children = [fork.Process(target=_produce, args=(connector, n, handles)) for n in range(3)]
    for child in children:
        child.start()
    for _ in range(90):
        assert torch.equal(get(connector, handles.get(timeout=30))["hidden"], PAYLOAD["hidden"])
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert len(files(directory)) == 1
    assert get(connector, kept)


def _close_in_child(connector: SharedMemoryConnector) -> None:
    put(connector, "child")
    connector.close()


def test_a_forked_child_frees_its_own_only(connect, directory: Path) -> None:
    connector = connect()
    handle = put(connector, "parent")
    child = fork.Process(target=_close_in_child, args=(connector,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert len(files(directory)) == 1
    assert connector.health()["status"] == "ok"
    assert get(connector, handle)


def _put_and_hang(directory: Path, deployment_id: str, ready) -> None:
    os.setsid()
    connector = SharedMemoryConnector(deployment_id, SharedMemoryOptions(directory=str(directory)))
    for number in range(5):
        put(connector, f"r{number}")
    ready.set()
    time.sleep(60)


@pytest.fixture
def hanging(directory: Path) -> Iterator[Callable[[str], multiprocessing.Process]]:
    children = []

    def start(deployment_id: str) -> multiprocessing.Process:
        ready = fork.Event()
        child = fork.Process(target=_put_and_hang, args=(directory, deployment_id, ready))
        child.start()
        children.append(child)
        assert ready.wait(30)
        return child

    yield start
    for child in children:
        child.kill()
        child.join(30)


def kill(child: multiprocessing.Process) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(30)


def test_sweep_after_sigkill_leaves_nothing(hanging, directory: Path) -> None:
    child, other = hanging("d"), hanging("d-2")
    kill(child)
    assert len(files(directory)) == 10
    assert sweep("d", directory) == 5
    assert {name[: len("vllm-omni-d-2")] for name in files(directory)} == {"vllm-omni-d-2"}
    kill(other)
    assert sweep("d-2", directory) == 5
    assert list(directory.iterdir()) == []


def test_stale_deployments_are_swept_and_live_ones_are_not(
    hanging, connect, directory: Path
) -> None:
    dead, live = hanging("dead"), hanging("live")
    connector = connect("starting")
    handle = put(connector, "r")
    assert sweep_stale(directory) == 0
    kill(dead)
    (directory / "vllm-omni-not-ours").touch()
    assert sweep_stale(directory) == 5
    assert len(files(directory)) == 7
    assert get(connector, handle)
    (directory / "vllm-omni-not-ours").unlink()
    kill(live)
    assert sweep_stale(directory) == 5
    assert [path.name for path in directory.iterdir()] == ["vllm-omni-starting-lock"]


def test_the_last_one_out_removes_what_killed_siblings_left(
    hanging, connect, directory: Path
) -> None:
    connector = connect("d")
    kill(hanging("d"))
    connector.close()
    assert list(directory.iterdir()) == []


def test_opening_while_the_lock_file_is_swept(connect, directory: Path) -> None:
    """The file may vanish between a newcomer's open and its lock; it must lock the next one."""
    path = directory / "vllm-omni-d-lock"
    sweeper = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(connect)
        time.sleep(0.2)  # Now it waits for the sweeper.
        path.unlink()
        os.close(sweeper)
        connector = opening.result(30)
    put(connector, "r")
    assert sweep_stale(directory) == 0
    assert len(files(directory)) == 1


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "shm"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_medium_leaves_nothing_behind(small_tmpfs: Path) -> None:
    connector = SharedMemoryConnector("d", SharedMemoryOptions(directory=str(small_tmpfs)))
    big = {"x": torch.zeros(2 << 20, dtype=torch.uint8)}
    fits = {"x": torch.zeros(600 << 10, dtype=torch.uint8)}

    result = connector.put("a", "b", make_key("r", "0"), big)
    assert not result.ok
    assert result.handle is None
    assert result.size > 2 << 20
    assert files(small_tmpfs) == []

    first = connector.put("a", "b", make_key("r", "1"), fits)
    assert first.ok
    assert not connector.put("a", "b", make_key("r", "2"), fits).ok
    assert first.handle is not None
    assert len(connector.get("a", "b", first.handle.key, first.handle)["x"]) == 600 << 10
    assert connector.put("a", "b", make_key("r", "2"), fits).ok
    assert connector.health()["full"] == 2
    connector.close()
    assert list(small_tmpfs.iterdir()) == []


def test_raze_removes_what_an_orphan_still_holds(tmp_path: Path) -> None:
    connector = SharedMemoryConnector("1-aa", SharedMemoryOptions(directory=str(tmp_path)))
    connector.put("a", "b", make_key("r", "x.0"), {"t": torch.ones(4)})
    assert raze("1-aa", tmp_path) == 2
    assert list(tmp_path.iterdir()) == []
    connector.close()
