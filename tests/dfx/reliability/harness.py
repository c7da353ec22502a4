# SPDX-License-Identifier: Apache-2.0
"""A live server, its processes, a load on it, and what must be gone when it has ended."""

import base64
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.processes import command_line, family
from vllm_omni.testing import media
from vllm_omni.testing.server import OmniServer

UNAVAILABLE_S = 2.0
"""A death must be seen within so long (issue 3)."""
RESPAWNED_S = 30.0
GONE_S = 20.0
"""A whole tree must be gone within so long after its root."""
LOAD = 4
FLAGS = (
    "--kv-cache-memory-bytes=33554432",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    "--enforce-eager",
    "--dtype=float32",
    "--disable-uvicorn-access-log",
)


def until(condition: Callable[[], Any], timeout: float) -> float:
    """Seconds until a condition held; fails if it did not in time."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"not within {timeout:g} s"
        time.sleep(0.02)
    return time.monotonic() - began


def measured(scenario: str, what: str, seconds: float) -> None:
    """Keep a figure for docs/reliability.md, where VLLM_OMNI_MEASURED names a file."""
    if path := os.environ.get("VLLM_OMNI_MEASURED"):
        line = json.dumps({"scenario": scenario, "what": what, "seconds": round(seconds, 2)})
        with open(path, "a") as file:
            file.write(line + "\n")


@dataclass
class Live:
    """A running server.

    Attributes:
        folder: Where its temporary files and sockets go, and nobody else's.
    """

    server: OmniServer
    model: str
    folder: Path

    @property
    def root(self) -> psutil.Process:
        return psutil.Process(self.server.process.pid)

    def workers(self, title: str) -> list[psutil.Process]:
        """Processes of its tree by title: `EngineCore` (thinker, talker), `OmniDiffusion`, ..."""
        return [p for p in family(self.server.process.pid)[1:] if title in command_line(p)]

    def health(self) -> int:
        """Status of /health; the API answers whatever its stages do (B-14)."""
        return httpx.get(f"{self.server.url}/health", timeout=5).status_code

    def ask(self, *modalities: str, max_tokens: int = 8, **options: Any) -> httpx.Response:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "hello"}],
            "modalities": list(modalities or ("text",)),
            "max_tokens": max_tokens,
            "temperature": 0,
            **options,
        }
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=60)

    def text(self) -> str:
        """A right answer; fails if it is anything else."""
        response = self.ask("text")
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def look(self) -> str:
        """A right answer about a picture, always the same one; from then on a decoder runs."""
        png = base64.b64encode(media.encode_image(media.image(64, 64))).decode()
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}
        text = {"type": "text", "text": "what is it?"}
        response = self.ask("text", messages=[{"role": "user", "content": [picture, text]}])
        assert response.status_code == 200, response.text
        assert self.workers("OmniDecoder")
        return str(response.json()["choices"][0]["message"]["content"])

    def media_hits(self) -> float:
        """How often processed media were taken from the cache."""
        lines = httpx.get(f"{self.server.url}/metrics", timeout=5).text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("vllm:mm_cache_hits_total{")
        )

    def becomes(self, status: int, timeout: float) -> float:
        return until(lambda: self.health() == status, timeout)

    def segments(self) -> list[str]:
        return [n for n in os.listdir("/dev/shm") if n.startswith(f"vllm-omni-{self.root.pid}-")]

    def files(self) -> list[str]:
        """Sockets and temporary folders that are left, and files by which workers meet."""
        left = self.folder.rglob("*")
        return [str(p) for p in left if p.is_socket() or p.is_dir() or "vllm_dist" in p.name]


@dataclass
class Load:
    """Long streamed requests, and how each ended: an error, a broken connection, or `None`."""

    outcomes: list[str | None] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    threads: list[threading.Thread] = field(default_factory=list)

    def join(self, timeout: float) -> list[str | None]:
        deadline = time.monotonic() + timeout
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a client hangs"
        return self.outcomes


def load(live: Live, count: int = LOAD) -> Load:
    """Requests for text and sound that would run for minutes; returns once all stream."""
    made = Load()

    def ask() -> None:
        made.outcomes.append(_stream(live, made.started))

    for _ in range(count):
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        made.threads.append(thread)
    for _ in range(count):
        assert made.started.acquire(timeout=60), "no answer began"
    return made


def _stream(live: Live, started: threading.Semaphore) -> str | None:
    body = {
        "model": live.model,
        "messages": [{"role": "user", "content": "hello"}],
        "modalities": ["text", "audio"],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{live.server.url}/v1/chat/completions"
    begun = False
    try:
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            if response.status_code != 200:
                return f"{response.status_code} {response.read().decode()}"
            for line in response.iter_lines():
                if not begun:
                    begun = True
                    started.release()
                if line.startswith("data: {") and "error" in (event := json.loads(line[6:])):
                    return str(event["error"]["message"])
    except httpx.TransportError as error:
        return f"connection: {error!r}"
    finally:
        if not begun:
            started.release()
    return None


def short_folder() -> Path:
    """A new folder; paths of sockets may have 107 bytes, and pytest's own folders are long."""
    return Path(tempfile.mkdtemp(prefix="rel-"))


@contextmanager
def serving(model: Path, folder: Path, flags: Sequence[str] = (), **env: str) -> Iterator[Live]:
    """A server that is killed afterwards if a test has not ended it."""
    folder.mkdir(parents=True, exist_ok=True)
    sockets = short_folder()
    env = {"VLLM_RPC_BASE_PATH": str(sockets), "TMPDIR": str(sockets), **env}
    server = OmniServer(
        model, [*FLAGS, *flags], log=folder / "server.log", env=env, start_timeout=120, fork=True
    )
    live = Live(server, str(model), sockets)
    server.start()
    try:
        yield live
    finally:
        if server.process.poll() is None:
            processes = family(server.process.pid)
            server.stop()
            psutil.wait_procs(processes, GONE_S)
            for process in processes:
                if process.is_running():
                    process.kill()
        shutil.rmtree(sockets)


class Tree:
    """The processes of a server at one moment, and everything it has outside of itself."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._root = live.root.pid
        self.processes = family(live.server.process.pid)

    def assert_gone(self) -> float:
        """Nothing is left: no process, no segment, no socket. Returns the seconds it took."""
        began = time.monotonic()
        _, alive = psutil.wait_procs(self.processes, GONE_S)
        assert not alive, alive
        left = [n for n in os.listdir("/dev/shm") if n.startswith(f"vllm-omni-{self._root}-")]
        assert left == [], left
        files = self._live.files()
        assert files == [], files
        return time.monotonic() - began
