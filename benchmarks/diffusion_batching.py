# SPDX-License-Identifier: Apache-2.0
"""Stock diffusers pipelines, batched at every step: throughput and latency against diffusers.

    python benchmarks/diffusion_batching.py [--size PIXELS] [FAMILY ...]

For each family, in one process and one run:

- (a) diffusers one request at a time: what a thin server around a pipeline does;
- (b) diffusers with a static batch of equal requests: the most that batching can give;
- the engine with 16 requests at a time, their step counts mixed from 4 to 50: whenever one ends,
  the next one starts.

Throughput counts the denoising steps of all requests per second, encoding and decoding included.
The last figure is the latency of a 4-step request that comes while fifteen of 50 steps run, as a
multiple of its latency alone.

A core of a CPU is full at few rows: from some size on not even a static batch is faster than single
requests. So each family has a size at which (b) gains something over (a), and no smaller one than
that takes, as what batching costs per step weighs more in small pictures. All of it is reported.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import WORK, Report
from diffusion_loop import steps_per_second

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.load import load
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.generation import PARAMETERS
from vllm_omni.testing import diffusers_tiny
from vllm_omni.testing.diffusers_tiny.media import VideoExample

SIZES = {
    "flux": 128,
    "sd3": 80,
    "qwen_image": 96,
    "z_image": 96,
    "sdxl": 80,
    "wan21_t2v": 96,
}
"""Pixels of a side by family."""
CONCURRENCY = 16
SHORT, LONG = 4, 50
REQUESTS = 64
"""Of which the first and the last `CONCURRENCY` are not timed."""
ROUNDS = 2
"""Of (a), (b) and the engine in turns; the best of each counts, as others use the machine too."""
ALONE = 6
"""Requests of (a): enough to be timed, too many to wait for."""
STATIC_STEPS = 20
LATENCY_RUNS = 5
WORDS = ("red", "green", "blue", "cat", "dog", "hill", "tree", "sea", "night", "snow", "old")


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: str
    steps: int
    seed: int


def jobs(count: int, seed: int = 0) -> list[Job]:
    """Requests with mixed steps; prompts of one length, as equal requests have."""
    draw = random.Random(seed)
    return [
        Job(" ".join(draw.choices(WORDS, k=6)), draw.randint(SHORT, LONG), i) for i in range(count)
    ]


class Family:
    """A family's tiny checkpoint, and the two ways to run it."""

    def __init__(self, name: str, size: int) -> None:
        folder = diffusers_tiny.build(name, WORK / "diffusers" / name)
        self.loaded: Loaded = load(LoadContext(str(folder), torch.device("cpu")))
        kit: Kit = self.loaded.assets["kit"]
        self.pipeline = kit.base
        self.example = diffusers_tiny.recipe(name).examples[0]
        self.size = size
        self.frames: dict[str, int] = {}
        self.program = programs.image
        if isinstance(self.example, VideoExample):
            assert self.example.frames is not None
            self.frames = {self.example.frames: self.example.default_frames}
            self.program = programs.video

    def arguments(self, job: Job) -> dict[str, Any]:
        """Of `__call__`."""
        return {
            **self.example.fixed,
            "height": self.size,
            "width": self.size,
            "num_inference_steps": job.steps,
            **self.frames,
        }

    def stock(self, batch: list[Job]) -> float:
        """Seconds that diffusers takes for a batch of equal requests."""
        generators = [torch.Generator().manual_seed(job.seed) for job in batch]
        began = time.perf_counter()
        with torch.inference_mode():
            self.pipeline(
                prompt=[job.prompt for job in batch],
                generator=generators,
                output_type="pt",
                **self.arguments(batch[0]),
            )
        return time.perf_counter() - began

    def message(self, job: Job) -> Message:
        """The same request for the engine."""
        params = self.arguments(job)
        own = {name: params.pop(name) for name in PARAMETERS if name in params}
        options = {
            "prompt": job.prompt,
            "seed": job.seed,
            "params": {**own, "seed": job.seed, "progress": True, "extra_args": params},
        }
        return Message(options, final=True)

    def engine(self) -> Engine:
        """A new engine over the same weights."""
        return Engine(self.program, self.loaded)


def closed_loop(family: Family, work: list[Job]) -> tuple[float, dict[int, int]]:
    """Steps per second of `CONCURRENCY` requests at a time, and batch sizes."""
    engine = family.engine()
    speed = steps_per_second(engine, work, family.message, CONCURRENCY)
    return speed, engine.forward_sizes


def short_latency(family: Family, company: int) -> float:
    """Seconds of a 4-step request that comes while so many long ones run."""
    engine = family.engine()
    for i, job in enumerate(jobs(company, seed=1)):
        engine.add(f"long {i}", family.message(Job(job.prompt, LONG, job.seed)))
    for _ in range(2 * company):
        engine.step()
    began = time.perf_counter()
    engine.add("short", family.message(Job("a small cat", SHORT, 99)))
    while True:
        if any(e.request_id == "short" and e.finished for e in engine.step()):
            return time.perf_counter() - began


def measure(name: str, size: int, report: Report) -> None:
    """Add one family's figures."""
    family = Family(name, size)
    work = jobs(REQUESTS)
    family.stock([work[0]])  # warm

    equal = [Job(job.prompt, STATIC_STEPS, job.seed) for job in work[:CONCURRENCY]]
    alone = static = mixed = 0.0
    for _ in range(ROUNDS):
        seconds = sum(family.stock([job]) for job in work[:ALONE])
        alone = max(alone, sum(job.steps for job in work[:ALONE]) / seconds)
        static = max(static, STATIC_STEPS * CONCURRENCY / family.stock(equal))
        speed, sizes = closed_loop(family, work)
        mixed = max(mixed, speed)

    quiet = statistics.median(short_latency(family, 0) for _ in range(LATENCY_RUNS))
    among = statistics.median(short_latency(family, CONCURRENCY - 1) for _ in range(LATENCY_RUNS))
    report.raw[name] = {
        "size": size,
        "steps_per_s": {"alone": alone, "static batch": static, "mixed": mixed},
        "batch_sizes": sizes,
        "short_request_s": {"alone": quiet, "among long ones": among},
    }
    note = f"{mixed:.0f} steps/s; (a) {alone:.0f}, (b) {static:.0f}; {size} px"
    report.add(f"{name}: time per step over (a)", alone / mixed, "x", 1 / 1.5, note)
    report.add(f"{name}: time per step over (b)", static / mixed, "x", 1 / 0.9, note)
    report.add(
        f"{name}: short request among long ones",
        among / quiet,
        "x",
        2,
        f"alone {quiet * 1e3:.0f} ms",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(SIZES), metavar="FAMILY")
    parser.add_argument("--size", type=int, help="pixels of a side; by default, the family's")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("diffusion_batching")
    for name in args.families:
        measure(name, args.size or SIZES[name], report)
    report.finish()


if __name__ == "__main__":
    main()
