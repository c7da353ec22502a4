# SPDX-License-Identifier: Apache-2.0
"""How long the three-stage server takes to start and to end, and what it leaves behind.

    python benchmarks/start_stop.py [--evict-page-cache]

A start is timed from the command `vllm serve <tiny checkpoint> --omni` to the first 200 of /health.
The cold start has empty caches of vLLM's and torch's own (fresh folders); with
`--evict-page-cache` the files of the Python environment and of the checkpoint are first dropped
from the page cache as far as an ordinary user may. Warm restarts reuse these caches.

Every end comes while requests for text and sound are running. Afterwards no process of the server
may be alive and no segment of it may be in /dev/shm.
"""

import argparse
import contextlib
import os
import signal
import site
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from common import PROMPT, Report, median, spread, tiny_checkpoint
from servers import MODEL, Server, until

COLD_GOAL_S = 25.0
WARM_GOAL_S = 20.0
STOP_TIMEOUT_S = 60
VANISH_TIMEOUT_S = 20
BUSY_REQUESTS = 4


@dataclass
class End:
    """How a server ended.

    Attributes:
        how: What was done to it.
        exit_code: Of the server; negative for a signal.
        exit_s: From the signal to the server's exit.
        gone_s: From the signal until no process of it was alive.
        processes: Still alive at the end of the patience.
        segments: Still in /dev/shm then.
        before: Segments at the time of the signal.
        health: Statuses of /health in between, where the server was to live on.
    """

    how: str
    exit_code: int | None
    exit_s: float | None
    gone_s: float | None
    processes: list[str]
    segments: list[str]
    before: int
    health: str = ""

    @property
    def clean(self) -> bool:
        return not self.processes and not self.segments and self.exit_s is not None


def keep_busy(server: Server) -> None:
    """Start long requests for text and sound, and come back once they run."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": PROMPT}],
        "modalities": ["text", "audio"],
        "max_tokens": 400,
        "min_tokens": 400,
        "ignore_eos": True,
        "sampling_params_list": [None, {"max_tokens": 400, "min_tokens": 400}, None],
    }

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)

    for _ in range(BUSY_REQUESTS):
        threading.Thread(target=ask, daemon=True).start()
    if until(lambda: server.running_requests() == BUSY_REQUESTS, 30) is None:
        raise SystemExit(f"the requests do not run; see {server.log}")


def end(server: Server, how: str, act: Callable[[], str], busy: bool) -> End:
    """Do something to a server and see how it ends."""
    if busy:
        keep_busy(server)
    server.tree()  # Takes note of descendants, so that they are known when they are orphans.
    before = len(server.segments())
    began = time.monotonic()
    health = act()
    code = server.wait(STOP_TIMEOUT_S)
    exit_s = None if code is None else time.monotonic() - began
    until(lambda: not server.tree(), VANISH_TIMEOUT_S)
    gone_s = time.monotonic() - began
    until(lambda: not server.segments(), VANISH_TIMEOUT_S)
    left = [f"{each.pid} {' '.join(each.cmdline())[:80]}" for each in server.tree()]
    found = End(how, code, exit_s, gone_s, left, server.segments(), before, health)
    server.kill_all()
    return found


def kill_a_stage(server: Server, engine: str) -> str:
    """SIGKILL one stage's process, watch /health, then stop the server with SIGTERM."""
    server.stage_processes(engine)[0].kill()
    noticed = until(lambda: server.health() != 200, 30)
    seen = f"200 -> {server.health()} after {noticed:.1f} s" if noticed is not None else "stays 200"
    server.process.send_signal(signal.SIGTERM)
    return seen


def started(model: Path, caches: Path) -> tuple[Server, float]:
    """A healthy server that keeps its caches in a folder, and the seconds it took."""
    folders = {"VLLM_CACHE_ROOT": caches / "vllm", "TORCHINDUCTOR_CACHE_DIR": caches / "inductor"}
    environment = {name: str(folder) for name, folder in folders.items()}
    server = Server(model, environment=environment)
    return server, server.wait_until_healthy()


def evict_page_cache(roots: Iterable[Path]) -> None:
    """Drop files from the page cache; pages that some process maps stay."""
    for root in roots:
        for path in root.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(descriptor)


def environment_folders() -> list[Path]:
    """Where Python, its standard library and the installed packages are."""
    folders = [*site.getsitepackages(), sysconfig.get_paths()["stdlib"]]
    return [Path(folder) for folder in folders]


def run(report: Report, warm: int, busy: bool, evict: bool) -> None:
    """Start and end servers; fill the report."""
    model = tiny_checkpoint()
    ways: list[tuple[str, Callable[[Server], str]]] = [
        ("SIGINT", lambda s: s.process.send_signal(signal.SIGINT) or ""),
        ("SIGTERM", lambda s: s.process.send_signal(signal.SIGTERM) or ""),
        ("SIGKILL", lambda s: s.process.kill() or ""),
        ("SIGKILL of the thinker's process, then SIGTERM", lambda s: kill_a_stage(s, "ar")),
        ("SIGKILL of code2wav's process, then SIGTERM", lambda s: kill_a_stage(s, "diffusion")),
    ]
    ways += [ways[0]] * max(0, warm + 1 - len(ways))
    times, ends = [], []
    with tempfile.TemporaryDirectory() as caches:
        if evict:
            evict_page_cache([*environment_folders(), model])
        for name, act in ways:
            server, took = started(model, Path(caches))
            times.append(took)
            print(f"started in {took:.1f} s; now {name}", flush=True)
            ends.append(end(server, name, lambda act=act, server=server: act(server), busy))
    report.raw = {"starts_s": times, "ends": [asdict(each) for each in ends]}
    cold = "cold start, page cache evicted" if evict else "cold start, page cache warm"
    report.add(cold, times[0], "s", COLD_GOAL_S, "fresh vLLM and torch caches")
    report.add("warm restart", median(times[1:]), "s", WARM_GOAL_S, spread(times[1:]))
    for each in ends:
        add_end(report, each)


def add_end(report: Report, found: End) -> None:
    """Rows of one end."""
    note = f"exit code {found.exit_code}; all processes gone after {found.gone_s:.1f} s"
    note += f"; /health {found.health}" if found.health else ""
    report.add(f"{found.how}: time to exit", found.exit_s or float("nan"), "s", None, note)
    left = len(found.processes) + len(found.segments)
    note = f"segments in /dev/shm: {found.before} before, {len(found.segments)} after"
    report.add("  processes and segments left", left, "", 0, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=int, default=4, help="warm restarts, at least four")
    parser.add_argument("--idle", action="store_true", help="end servers that have nothing to do")
    parser.add_argument("--evict-page-cache", action="store_true", help="before the first start")
    arguments = parser.parse_args()

    report = Report("start_stop")
    run(report, arguments.warm, not arguments.idle, arguments.evict_page_cache)
    report.finish()


if __name__ == "__main__":
    main()
