# SPDX-License-Identifier: Apache-2.0
"""Resources that run out under a live server: shared memory, disk, descriptors, memory (issue 3).

Each time: what cannot be served fails with a clear error, everything else goes on, and once there
is room again every answer is right.
"""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.dfx.reliability.harness import RESPAWNED_S, UNAVAILABLE_S, Live, serving, until
from tests.dfx.reliability.test_signals import assert_recovers, worker
from tests.processes import has_ended
from vllm_omni.config.load import packaged_deploys

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

SMALL_BYTES = 4 << 20
LONG_PROMPT = "word " * 300
"""Its hidden rows are larger than what rides in a message."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_omni_moe")


@contextmanager
def small_tmpfs(folder: Path) -> Iterator[Path]:
    """A file system of `SMALL_BYTES`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return path


def spoken(live: Live, words: str = LONG_PROMPT) -> tuple[int, str]:
    """Status and text, or error, of a request for sound."""
    messages = [{"role": "user", "content": words}]
    response = live.ask("text", "audio", messages=messages)
    body = response.json()
    if response.status_code != 200:
        return response.status_code, body["error"]["message"]
    return 200, body["choices"][0]["message"]["audio"]["data"]


@dataclass(frozen=True)
class Cramped:
    """A server and the small file systems of its tensors and of its temporary files."""

    live: Live
    memory: Path
    disk: Path


@pytest.fixture(scope="module")
def cramped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cramped]:
    folder = tmp_path_factory.mktemp("cramped")
    with ExitStack() as stack:
        memory = stack.enter_context(small_tmpfs(folder / "shm"))
        disk = stack.enter_context(small_tmpfs(folder / "disk"))
        deploy = yaml.safe_load(packaged_deploys()["qwen3_omni_moe"].read_text())
        deploy["connectors"]["codec_stream"]["extra"] |= {
            "directory": str(memory),
            "shm_threshold_bytes": 4096,
        }
        config = folder / "deploy.yaml"
        config.write_text(yaml.safe_dump(deploy))
        flags = ["--deploy-config", str(config)]
        live = stack.enter_context(serving(model, folder / "server", flags, TMPDIR=str(disk)))
        yield Cramped(live, memory, disk)


def test_full_shared_memory(cramped: Cramped) -> None:
    """Requests whose tensors have no room fail; text goes on; nothing dies."""
    live, memory = cramped.live, cramped.memory
    text, expected = live.text(), spoken(live)
    assert expected[0] == 200
    filler = fill(memory)
    for _ in range(3):
        status, message = spoken(live)
        assert status == 503 and "shared memory is full" in message
        assert live.text() == text
    assert live.health() == 200
    filler.unlink()
    assert spoken(live) == expected
    until(lambda: [n for n in os.listdir(memory) if not n.endswith("-lock")] == [], 10)


def test_full_disk(cramped: Cramped) -> None:
    """A server writes nothing while it serves; a stage that starts again waits for room."""
    live = cramped.live
    expected = live.text()
    filler = fill(cramped.disk)
    assert live.text() == expected
    assert spoken(live)[0] == 200
    worker(live, "code2wav").kill()
    live.becomes(503, UNAVAILABLE_S)
    assert live.text() == expected
    filler.unlink()
    assert_recovers(live, expected)


@pytest.mark.full_model
def test_no_descriptors_left(model: Path, tmp_path: Path) -> None:
    """Connections beyond the limit wait or break; the server does not."""
    with serving(model, tmp_path) as live:
        expected = live.text()
        limits = resource.prlimit(live.root.pid, resource.RLIMIT_NOFILE)
        few = live.root.num_fds() + 8
        resource.prlimit(live.root.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
        with ExitStack() as stack:
            for _ in range(40):
                address = ("127.0.0.1", live.server.port)
                stack.enter_context(socket.create_connection(address, timeout=5))
            assert live.server.process.poll() is None
        until(lambda: answers(live, expected), 20)
        resource.prlimit(live.root.pid, resource.RLIMIT_NOFILE, limits)
        assert live.text() == expected
        assert spoken(live)[0] == 200


def answers(live: Live, expected: str) -> bool:
    try:
        return live.text() == expected
    except Exception:
        return False


@pytest.mark.full_model
def test_a_worker_without_memory(model: Path, tmp_path: Path) -> None:
    """An engine core that gets no memory ends, and is replaced by one that does."""
    with serving(model, tmp_path) as live:
        expected = live.text()
        core = worker(live, "thinker")
        hard = resource.prlimit(core.pid, resource.RLIMIT_AS)[1]
        resource.prlimit(core.pid, resource.RLIMIT_AS, (core.memory_info().vms, hard))
        statuses = set()
        for length in range(40, 400, 40):
            words = [{"role": "user", "content": "word " * length}]
            statuses.add(live.ask("text", messages=words, max_tokens=200).status_code)
            if has_ended(core):
                break
        assert statuses <= {200, 500, 503}
        live.becomes(200, RESPAWNED_S)
        assert live.text() == expected
