# SPDX-License-Identifier: Apache-2.0
"""Live servers of tiny diffusion checkpoints, and what their tests ask of them."""

import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from PIL import Image

from tests.conftest import CHECKPOINTS
from tests.processes import family
from vllm_omni.testing.diffusers_tiny import build
from vllm_omni.testing.server import OmniServer

MODEL = "tiny"
KEY, OTHER_KEY = "key-of-one", "key-of-another"
SIZE = "32x32"
MAX_PIXELS = 64 * 64
STEPS = {"num_inference_steps": 2}
FLAGS = (
    *("--served-model-name", MODEL),
    *("--max-generated-image-size", str(MAX_PIXELS)),
    *("--max-body-bytes", "4000000"),
    *("--api-key", KEY, OTHER_KEY),
    "--open-metrics",
)


class GenerationServer(OmniServer):
    """A running server; its temporary files go into a folder that can be looked at."""

    def __init__(self, name: str, folder: Path, *flags: str, **env: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        super().__init__(
            build(name, CHECKPOINTS / f"diffusers-{name}"),
            [*FLAGS, *flags],
            log=folder / "log.txt",
            env={"TMPDIR": str(self.temporary), "VLLM_CACHE_ROOT": str(folder / "cache"), **env},
            fork=True,
        )

    def openai(self, key: str = KEY) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def request(self, method: str, path: str, key: str | None = KEY, **kw: Any) -> httpx.Response:
        """A raw request."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        headers |= kw.pop("headers", {})
        return httpx.request(method, self.url + path, headers=headers, timeout=120, **kw)

    def assert_blames(self, reply: httpx.Response, param: str | None, status: int = 400) -> str:
        """An error of OpenAI's shape that names the field; its message."""
        assert reply.status_code == status, reply.text
        error = reply.json()["error"]
        assert error["param"] == param, error
        if param:
            assert param.split(".")[0] in error["message"], error
        return str(error["message"])

    def running(self) -> float:
        """Requests in the pipeline, by its metrics."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("vllm_omni:num_requests_")
        )

    def wait_idle(self) -> None:
        """Wait until nothing runs."""
        deadline = time.monotonic() + 60
        while self.running():
            assert time.monotonic() < deadline, "a request never ended"
            time.sleep(0.05)

    def files(self) -> set[str]:
        """Every file that the server has made for a request: temporary ones and shared memory."""
        names = {str(path) for path in self.temporary.rglob("*") if path.is_file()}
        for process in family(self.process.pid):
            names |= _deleted_files(process)
        return names

    def memory(self) -> int:
        """Bytes that its processes have for themselves."""
        return sum(_own_memory(process) for process in family(self.process.pid))


@contextmanager
def generation_server(
    name: str, folder: Path, *flags: str, **env: str
) -> Iterator[GenerationServer]:
    """A server, stopped in order afterwards, unless a test has killed it."""
    server = GenerationServer(name, folder, *flags, **env)
    server.start()
    try:
        yield server
    finally:
        was_killed = server.process.poll() == -signal.SIGKILL
        code = server.stop()
    assert was_killed or code == 0, server.log_tail()
    assert "Traceback" not in server.log.read_text(errors="replace"), server.log_tail()


def png(size: tuple[int, int] = (32, 32), mode: str = "RGB") -> bytes:
    """A picture's file."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert(mode).save(file, "PNG")
    return file.getvalue()


def _deleted_files(process: psutil.Process) -> set[str]:
    """Open files without a name, but for shared memory of the program's own."""
    try:
        links = Path(f"/proc/{process.pid}/fd").iterdir()
        targets = {os.readlink(link) for link in links}
    except OSError:
        return set()
    return {target for target in targets if target.endswith("(deleted)") and "/tmp" in target}


def _own_memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().uss)
    except psutil.Error:
        return 0
