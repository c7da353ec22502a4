# SPDX-License-Identifier: Apache-2.0
"""One live server for all tests of this folder, started as a user would."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from vllm_omni.testing.tiny import build

MODEL = "tiny"
MAX_BODY_BYTES = 4_000_000
START_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
SERVE_FLAGS = (
    *("--served-model-name", MODEL),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "4"),
    *("--dtype", "float32"),
    *("--kv-cache-memory-bytes", "8000000"),
    *("--limit-mm-per-prompt", '{"image": 2, "audio": 2, "video": 1}'),
    *("--max-body-bytes", str(MAX_BODY_BYTES)),
    "--enforce-eager",
)


@dataclass
class LiveServer:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(self, body: dict[str, object], **kwargs: object) -> httpx.Response:
        """A raw chat request."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, **kwargs)

    def assert_answers(self) -> None:
        """Whatever happened before, the server still does its work."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        reply = self.chat(body)
        assert reply.status_code == 200, reply.text
        assert httpx.get(f"{self.url}/health").status_code == 200


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def serve_command(checkpoint: Path, port: int, *flags: str) -> list[str]:
    """What a user types."""
    main = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main"]
    return [*main, "serve", str(checkpoint), "--omni", "--port", str(port), *SERVE_FLAGS, *flags]


def serve_environment() -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**os.environ, **threads, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_omni_moe", tmp_path_factory.mktemp("tiny") / "qwen3_omni_moe")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server; at the end it must stop cleanly on SIGTERM and leave no process behind.

    `OMNI_TEST_SERVER_PORT` names one that is running already.
    """
    if port := os.environ.get("OMNI_TEST_SERVER_PORT"):
        yield LiveServer(int(port))
        return
    live = start_server(checkpoint, tmp_path_factory.mktemp("server") / "log.txt")
    yield live
    stop_server(live)


def start_server(checkpoint: Path, log: Path, *flags: str) -> LiveServer:
    """Start a server and wait until it is healthy."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            serve_command(checkpoint, port, *flags),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=serve_environment(),
        )
    live = LiveServer(port, process, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-8000:]}")
        try:
            if httpx.get(f"{live.url}/health", timeout=2).status_code == 200:
                return live
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    process.kill()
    pytest.fail(f"the server did not start:\n{log.read_text()[-8000:]}")


def stop_server(live: LiveServer, number: int = signal.SIGTERM) -> None:
    """Stop a server by a signal; it must end with 0 and take its children along."""
    assert live.process is not None and live.log is not None
    children = psutil.Process(live.process.pid).children(recursive=True)
    live.process.send_signal(number)
    try:
        code = live.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        live.process.kill()
        pytest.fail(f"the server did not stop:\n{live.log.read_text()[-8000:]}")
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert not alive, f"left behind: {alive}"
    assert code == 0, live.log.read_text()[-8000:]


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it
