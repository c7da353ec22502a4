# SPDX-License-Identifier: Apache-2.0
"""What an idle server costs, and whether its memory grows.

    python benchmarks/steady_state.py

Idle: CPU time of every process of the tree over 30 s without requests, in percent of one core.
Memory: the proportional set size (PSS: shared pages count once) of the tree and the resident set of
the server process, after 100 and after 1,000 requests over HTTP. The requests are a fixed mix of
text, streamed text, speech, streamed speech, and pictures, sounds and videos as input, eight at a
time; one in twenty is hung up on half-way. Media are drawn from a small pool, so that vLLM's
bounded caches of processed media have filled before the first reading.
"""

import argparse
import asyncio
import base64
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import Report, tiny_checkpoint
from servers import MODEL, Server, served

IDLE_GOAL = 2.0
GROWTH_GOAL = 3.0
CLIENTS = 8
HANG_UP_EVERY = 20
POOL = 4
ANSWER_TOKENS = 16
SPOKEN_FRAMES = 32
SETTLE_S = 5


def text_part(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def media_parts(index: int) -> dict[str, dict[str, Any]]:
    """A picture, a sound and a video of the pool, as parts of a message."""
    from vllm_omni.testing import media

    picture = media.data_url(media.encode_image(media.image(96, 64, seed=index)), "png")
    sound = base64.b64encode(media.encode_audio(media.sound(1.0 + index / 4, seed=index)))
    film = media.data_url(media.encode_video(media.video(4, 64, 48, seed=index)), "mp4")
    return {
        "image": {"type": "image_url", "image_url": {"url": picture}},
        "audio": {"type": "input_audio", "input_audio": {"data": sound.decode(), "format": "wav"}},
        "video": {"type": "video_url", "video_url": {"url": film}},
    }


def bodies() -> Iterator[dict[str, Any]]:
    """Requests of mixed kinds, for ever."""
    pool = [media_parts(index) for index in range(POOL)]
    kinds = ("text", "image", "audio", "video", "mix")
    answers = itertools.product(kinds, (False, True), (False, True))
    for number, (kind, spoken, stream) in enumerate(itertools.cycle(list(answers))):
        parts = pool[number % POOL]
        wanted = {"text": [], "mix": ["image", "audio"]}.get(kind, [kind])
        content = [parts[name] for name in wanted] + [text_part(f"request number {number % 50}")]
        yield {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "modalities": ["text", "audio"] if spoken else ["text"],
            "max_tokens": ANSWER_TOKENS,
            "stream": stream,
            "sampling_params_list": [None, {"max_tokens": SPOKEN_FRAMES}, None],
            **({"audio": {"format": "pcm16" if stream else "wav"}} if spoken else {}),
        }


async def send(server: Server, requests: Iterator[dict[str, Any]], count: int) -> int:
    """Send so many requests; returns how many were answered in full."""
    remaining = iter(range(1, count + 1))
    answered = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal answered
        for number in remaining:
            in_full = await ask(http, next(requests), hang_up=number % HANG_UP_EVERY == 0)
            answered += in_full

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return answered


async def ask(http: httpx.AsyncClient, body: dict[str, Any], hang_up: bool) -> bool:
    """One request; whether its answer was read to the end."""
    if not hang_up:
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text[:500]
        return True
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply:
        async for _ in reply.aiter_bytes():
            return False
    return False


def cpu_seconds(processes: list[psutil.Process]) -> dict[int, float]:
    """User and system time of each process so far."""
    times = {process.pid: process.cpu_times() for process in processes}
    return {pid: each.user + each.system for pid, each in times.items()}


def idle(server: Server, seconds: float) -> dict[str, float]:
    """Percent of one core that each process uses."""
    time.sleep(SETTLE_S)
    processes = server.tree()
    before, began = cpu_seconds(processes), time.monotonic()
    time.sleep(seconds)
    after, took = cpu_seconds(processes), time.monotonic() - began
    return {f"{p.pid} {title(p)}": 100 * (after[p.pid] - before[p.pid]) / took for p in processes}


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())[:60]


def memory(server: Server) -> dict[str, Any]:
    """MiB: PSS of the tree, resident set of the server process, PSS of each process."""
    time.sleep(SETTLE_S)
    each = {f"{p.pid} {title(p)}": pss(p.pid) for p in server.tree()}
    rss = psutil.Process(server.process.pid).memory_info().rss / 2**20
    return {"pss": sum(each.values()), "rss": rss, "each": each}


def pss(pid: int) -> float:
    """Proportional set size in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def report_idle(report: Report, name: str, found: dict[str, float]) -> None:
    """A row for one idle reading."""
    busiest = max(found, key=lambda key: found[key])
    note = f"{len(found)} processes; busiest {found[busiest]:.2f} %: {busiest}"
    report.add(name, sum(found.values()), "% of a core", IDLE_GOAL, note)
    report.raw[name] = found


def report_memory(report: Report, readings: dict[int, dict[str, Any]]) -> None:
    """Rows of the readings, each against the first."""
    report.raw["memory"] = readings
    first, *later = readings
    for count, reading in readings.items():
        note = f"server process alone: {reading['rss']:.0f} MiB resident"
        report.add(f"memory after {count} requests", reading["pss"], "MiB PSS", note=note)
    for count in later:
        for key, name in (("pss", "tree, PSS"), ("rss", "server process, RSS")):
            growth = 100 * (readings[count][key] / readings[first][key] - 1)
            goal = GROWTH_GOAL if count == later[-1] else None
            report.add(f"growth from {first} to {count}: {name}", growth, "%", goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readings", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--idle-seconds", type=float, default=30)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for the server")
    arguments = parser.parse_args()

    report = Report("steady_state")
    with served(tiny_checkpoint(), *arguments.flags) as server:
        report_idle(report, "idle CPU after start", idle(server, arguments.idle_seconds))
        requests, sent, readings = bodies(), 0, {}
        for count in arguments.readings:
            began = time.monotonic()
            answered = asyncio.run(send(server, requests, count - sent))
            took, fresh, sent = time.monotonic() - began, count - sent, count
            readings[count] = memory(server)
            print(f"{sent} requests, the last {fresh} in {took:.0f} s ({answered} read to the end)")
        report_idle(report, "idle CPU after requests", idle(server, arguments.idle_seconds))
        report_memory(report, readings)
    report.finish()


if __name__ == "__main__":
    main()
