# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS-1.7B's shape on a GPU: first playable sound, continuity, and sound per second.

    python benchmarks/speech_gpu.py [--device 0] [--parts alone,open1,open20,closed64]

Random weights in bfloat16 (so what is said is noise, of a length that is asked for), the family's
deploy file as it is, requests through `AsyncOmni`. *Playable* is a request's first packet of sound
(two frames, 0.16 s; one of the low-latency profile). A request is *continuous* if a player that
starts with the first packet never waits longer than 100 ms for the next.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from common import WORK, Report

FRAMES = 63
"""Codec frames of a request: 5 s of sound."""
TEXT = "The quick brown fox jumps over the lazy dog near the river bank."
VOICE = "serena"
GAP_S = 0.1
PARTS = ("alone", "open1", "open20", "closed64")


@dataclass(frozen=True, slots=True)
class Heard:
    """One request: seconds from its start to each packet, and each packet's seconds of sound."""

    arrivals: list[float]
    durations: list[float]

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def sound(self) -> float:
        return sum(self.durations)

    @property
    def longest_gap(self) -> float:
        """How long a player waits for a packet, at most."""
        plays_until, longest = self.arrivals[0], 0.0
        for arrival, duration in zip(self.arrivals, self.durations, strict=True):
            longest = max(longest, arrival - plays_until)
            plays_until = max(plays_until, arrival) + duration
        return longest


class Server:
    """The deployment, and requests to it."""

    def __init__(self, device: str, deploy: str, overrides: dict[str, Any], mps: bool) -> None:
        from gpu_checkpoints import qwen3_tts

        from vllm_omni import AsyncOmni
        from vllm_omni.config.build import build_plan
        from vllm_omni.speech.request import SpeechRequest

        model = qwen3_tts(WORK / "qwen3_tts_1b7")
        talker = {"stage_id": 0, "devices": device, "load_format": "dummy", **overrides}
        config = {
            "base_config": f"{deploy}.yaml",
            "cuda_mps": mps,
            "stages": [talker, {"stage_id": 1, "devices": device}],
        }
        began = time.perf_counter()
        self.omni = AsyncOmni.from_plan(build_plan(str(model), deploy_config=config))
        self.start_s = time.perf_counter() - began
        self._request = SpeechRequest(text=TEXT, voice=VOICE)
        self._count = 0

    async def say(self) -> Heard:
        """One request."""
        self._count += 1
        drawn = {"temperature": 0.9, "top_k": 50, "seed": self._count}
        params = [{**drawn, "max_tokens": FRAMES, "min_tokens": FRAMES}, None]
        arrivals, durations = [], []
        began = time.perf_counter()
        async for output in self.omni.generate(self._request, sampling_params_list=params):
            if output.audio is not None and len(output.audio.samples):
                arrivals.append(time.perf_counter() - began)
                durations.append(len(output.audio.samples) / output.audio.sample_rate)
        return Heard(arrivals, durations)


async def closed_loop(say: Callable[[], Awaitable[Heard]], at_once: int, count: int) -> list[Heard]:
    """`count` requests, so many at once."""
    left = iter(range(count))

    async def one_after_another() -> list[Heard]:
        return [await say() for _ in left]

    done = await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return [each for group in done for each in group]


async def open_loop(say: Callable[[], Awaitable[Heard]], rate: float, count: int) -> list[Heard]:
    """`count` requests that come at random times, `rate` per second on average."""
    times = random.Random(0)
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.ensure_future(say()))
        await asyncio.sleep(times.expovariate(rate))
    return await asyncio.gather(*tasks)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all are not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


GOALS: dict[str, dict[str, float]] = {
    "open1": {"median": 20},
    "open20": {"p95": 45, "interrupted": 0.5},
    "closed64": {"ms per second of sound": 10},
}


def tell(report: Report, part: str, heard: list[Heard], wall: float) -> None:
    """Figures of a part."""
    goals = GOALS.get(part, {})
    first = [each.first * 1e3 for each in heard]
    gaps = [each.longest_gap for each in heard]
    sound = sum(each.sound for each in heard)
    note = f"{len(heard)} requests, {min(first):.1f} to {max(first):.1f} ms"
    figures = {
        "median": (statistics.median(first), "ms"),
        "p95": (percentile(first, 0.95), "ms"),
        "interrupted": (100 * sum(gap > GAP_S for gap in gaps) / len(gaps), "%"),
        "ms per second of sound": (wall / sound * 1e3, "ms"),
    }
    for name, (value, unit) in figures.items():
        what = "first playable sound, " if name in ("median", "p95") else ""
        report.add(f"{part}: {what}{name}", value, unit, goals.get(name), note)
        note = f"{sound / wall:.1f} s of sound a second" if name == "interrupted" else ""
    report.raw[part] = {
        "wall_s": wall,
        "first_ms": first,
        "longest_gap_s": gaps,
        "end_s": [each.arrivals[-1] for each in heard],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="0")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--deploy", default="qwen3_tts", help="name of a shipped deploy file")
    parser.add_argument("--name", default="speech_gpu", help="of the result file")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--mps", action="store_true", help="stages at the same time (cuda_mps)")
    args = parser.parse_args()
    report = Report(args.name)
    overrides = {"enforce_eager": True} if args.eager else {}
    server = Server(args.device, args.deploy, overrides, args.mps)
    report.raw["start_s"] = server.start_s
    work: dict[str, Callable[[], Awaitable[list[Heard]]]] = {
        "alone": lambda: closed_loop(server.say, 1, 12),
        "open1": lambda: open_loop(server.say, 1, 20),
        "open20": lambda: open_loop(server.say, 20, 300),
        "closed64": lambda: closed_loop(server.say, 64, 256),
    }

    async def run() -> None:
        await closed_loop(server.say, 1, 2)
        await closed_loop(server.say, 32, 64)  # warm
        for part in args.parts.split(","):
            began = time.perf_counter()
            heard = await work[part]()
            tell(report, part, heard, time.perf_counter() - began)
            report.finish()
        await asyncio.to_thread(server.omni.shutdown, 5)

    asyncio.run(run())


if __name__ == "__main__":
    main()
