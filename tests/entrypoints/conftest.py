# SPDX-License-Identifier: Apache-2.0
"""One live server for all tests of this folder, started as a user would."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.entrypoints.browser import CHROMIUM, DESKTOP, DRIVER, Page, browser
from tests.processes import family
from vllm_omni.testing.server import OmniServer
from vllm_omni.testing.tiny import build

MODEL = "tiny"
MAX_BODY_BYTES = 4_000_000
MAX_FRAME_BYTES = 500_000
MAX_SESSIONS = 8
IDLE_TIMEOUT_S = 3
STOP_TIMEOUT_S = 60
THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SERVE_FLAGS = (
    *("--served-model-name", MODEL),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "4"),
    *("--dtype", "float32"),
    *("--kv-cache-memory-bytes", "8000000"),
    *("--limit-mm-per-prompt", '{"image": 2, "audio": 2, "video": 1}'),
    *("--max-body-bytes", str(MAX_BODY_BYTES)),
    *("--default-sampling-params", '{"thinker": {"temperature": 0}}'),
    *("--mm-processor-cache-gb", "0.05"),  # fills in the warm-up of tests that look for leaks
    *("--realtime-max-sessions", str(MAX_SESSIONS)),
    *("--realtime-max-frame-bytes", str(MAX_FRAME_BYTES)),
    *("--realtime-idle-timeout", str(IDLE_TIMEOUT_S)),
    "--enforce-eager",
)


class LiveServer(OmniServer):
    """A running server and what these tests ask of it."""

    def chat(self, body: dict[str, object], **kwargs: object) -> httpx.Response:
        """A raw chat request."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60, **kwargs)

    def assert_answers(self) -> None:
        """Whatever happened before, the server still does its work."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        reply = self.chat(body)
        assert reply.status_code == 200, reply.text
        assert httpx.get(f"{self.url}/health").status_code == 200

    def running_requests(self) -> float:
        """Requests in the engines, by vLLM's metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        )

    def stop_cleanly(self) -> None:
        """SIGTERM: it must end with 0 and take its children along."""
        children = family(self.process.pid)[1:]
        code = self.stop(signal.SIGTERM, STOP_TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=10)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"
        assert code == 0, self.log_tail()


def serve_command(checkpoint: Path, port: int, *flags: str) -> list[str]:
    """What a user types."""
    main = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main"]
    return [*main, "serve", str(checkpoint), "--omni", "--port", str(port), *SERVE_FLAGS, *flags]


def serve_environment() -> dict[str, str]:
    return {**os.environ, **THREADS, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_omni_moe", tmp_path_factory.mktemp("tiny") / "qwen3_omni_moe")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server; at the end it must stop cleanly on SIGTERM and leave no process behind."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    live = LiveServer(checkpoint, SERVE_FLAGS, log=log, env=THREADS)
    live.start()
    yield live
    live.stop_cleanly()


@pytest.fixture(scope="module")
def new_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser; without Chromium, tests that need one are skipped.

    It ends with the module: tests of other folders count this process's children.
    """
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(new_page: Page) -> Iterator[Page]:
    """A browser's page; whatever a test does there, nothing may go wrong unseen."""
    new_page.driver.get("about:blank")
    new_page.problems()
    new_page.expected.clear()
    new_page.size(*DESKTOP)
    new_page.prefer("light")
    yield new_page
    new_page.assert_clean()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it
