# SPDX-License-Identifier: Apache-2.0
"""Diffusion transformers of published sizes against diffusers, on one GPU.

    python benchmarks/diffusion_table_gpu.py [--parts qwen_image,flux_schnell,z_image,wan22_ti2v]
    python benchmarks/diffusion_table_gpu.py --scale tiny --device cpu  # to try the script

For each model, in one process, over the same weights (random, bfloat16):

- (a) diffusers, one request after the other in the order in which they came;
- (b) the same with its blocks compiled (`compile_repeated_blocks()`) and the engine's attention;
- (c) the engine with compiled blocks, all requests at once.

Each is run in vain before. A ratio below 1 says that the engine takes less time. Qwen-Image's steps
are a fifth of 20 to 50, so that a run takes seconds; all else that a request costs stays whole.
"""

import argparse
import gc
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import vllm  # noqa: F401 - before diffusers, which looks for CUDA so that no process can be forked
from common import ROOT, Report

sys.path.insert(0, str(ROOT))

from diffusion_batching import Job
from diffusion_gpu import describe
from table_models import SHAPES, TableModel, mixed, run_all

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.programs.diffusers.acceleration import (
    compile_blocks,
)

ROUNDS = 3
"""Of single requests, diffusers and engine in turns."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a model.

    Attributes:
        size: Arguments that say how large the result is.
        jobs: Requests that come at once.
        goal: Largest ratio of the engine's time to (a)'s.
        goal_compiled: The same against (b), if there is one.
        goal_latency: Largest ratio of mean latencies to those of (a).
        overhead: Largest overhead of a request alone, in percent.
    """

    size: Mapping[str, int]
    jobs: Sequence[Job]
    goal: float
    goal_compiled: float | None = None
    goal_latency: float | None = None
    overhead: float | None = None

    @property
    def name(self) -> str:
        """Its size in words."""
        frames = f" x {self.size['num_frames']}" if "num_frames" in self.size else ""
        return f"{self.size['width']}x{self.size['height']}{frames}"


def _square(pixels: int) -> dict[str, int]:
    return {"height": pixels, "width": pixels}


SHORT = mixed(16, 4, 12)
WORKLOADS: Mapping[str, Sequence[Workload]] = {
    "qwen_image": (Workload(_square(1024), mixed(16, 4, 10), 1 / 1.25, 1.0, 0.8, 3.0),),
    "flux_schnell": (
        Workload(_square(256), SHORT, 1 / 2.5),
        Workload(_square(512), SHORT, 1 / 1.5),
    ),
    "z_image": (
        Workload(_square(256), SHORT, 1 / 2.5),
        Workload(_square(512), SHORT, 1 / 1.5),
    ),
    "wan22_ti2v": (
        Workload({"height": 480, "width": 832, "num_frames": 49}, mixed(2, 20, 20)[:1], 0.9),
    ),
}
TINY: Mapping[str, Sequence[Workload]] = {
    name: (
        Workload(
            {"height": 32, "width": 32} | ({"num_frames": 5} if shape.video else {}),
            mixed(2, 2, 3),
            1.0,
            1.0,
            1.0,
            3.0,
        ),
    )
    for name, shape in SHAPES.items()
}


def one_by_one(model: TableModel, jobs: Sequence[Job]) -> list[float]:
    """Seconds of each request, one after the other; all of them have run shortened in vain."""
    for job in jobs:
        model.stock(Job(job.prompt, 2, job.seed))
    return [model.stock(job) for job in jobs]


def together(model: TableModel, engine: Engine, jobs: Sequence[Job]) -> list[float]:
    """Seconds at which each of the requests is done that come at once."""
    done = run_all(engine, {str(job.seed): model.message(job) for job in jobs})
    return [done[str(job.seed)] for job in jobs]


def measure(model: TableModel, workloads: Sequence[Workload], attention: str, report: Report):
    """All of a model's workloads: (a), then (c), then (b), which compiles anew."""
    name = model.name
    plain = [one_by_one(model.sized(work.size), work.jobs) for work in workloads]
    began = time.perf_counter()
    model.accelerate(attention)
    report.raw[f"{name}: seconds of checking and compiling"] = time.perf_counter() - began
    engines = [batched(model.sized(work.size), work.jobs) for work in workloads]
    torch._dynamo.reset()
    compile_blocks([model.denoiser], dynamic=None)
    began = time.perf_counter()
    compiled = [one_by_one(model.sized(work.size), work.jobs) for work in workloads]
    report.raw[f"{name}: seconds of (b), compiling included"] = time.perf_counter() - began
    for work, a, b, (c, sizes, single) in zip(workloads, plain, compiled, engines, strict=True):
        tell(f"{name}, {work.name}", work, (a, b, c), single, report)
        report.raw[f"{name}, {work.name}"] |= {"forwards_by_calls": sizes}


def batched(
    model: TableModel, jobs: Sequence[Job]
) -> tuple[list[float], dict[int, int], dict[str, list[float]]]:
    """(c): seconds until each is done, how many forwards of how many calls, and single requests."""
    engine = model.engine()
    together(model, engine, jobs[:1])
    together(model, engine, jobs)
    before = dict(engine.forward_sizes)
    times = together(model, engine, jobs)
    sizes = {n: k - before.get(n, 0) for n, k in engine.forward_sizes.items()}
    return times, sizes, alone(model, engine, jobs)


def alone(model: TableModel, engine: Engine, jobs: Sequence[Job]) -> dict[str, list[float]]:
    """Seconds of the median request alone, by diffusers with the same kernels and by the engine."""
    job = sorted(jobs, key=lambda each: each.steps)[len(jobs) // 2]
    took: dict[str, list[float]] = {"diffusers": [], "engine": []}
    for number in range(ROUNDS + 1):
        seconds = {"diffusers": model.stock(job)}
        seconds["engine"] = together(model, engine, [job])[0]
        for who in took if number else ():
            took[who].append(seconds[who])
    return took


def tell(
    name: str,
    work: Workload,
    times: tuple[list[float], list[float], list[float]],
    single: Mapping[str, list[float]],
    report: Report,
) -> None:
    """Add the ratios."""
    a, b, c = times
    count = len(work.jobs)
    total = {"a": sum(a), "b": sum(b), "c": max(c)}
    mean = {"a": _mean_latency(a), "b": _mean_latency(b), "c": statistics.mean(c)}
    report.raw[name] = {
        "steps": [job.steps for job in work.jobs],
        "seconds": {"a": a, "b": b, "c": c},
        "alone_s": single,
    }
    speed = ", ".join(f"({arm}) {count / seconds:.3g}" for arm, seconds in total.items())
    ratio = total["c"] / total["a"]
    note = f"{1 / ratio:.2f} times as fast; a second: {speed}"
    report.add(f"{name}: time over (a) diffusers", ratio, "x", work.goal, note)
    ratio = total["c"] / total["b"]
    note = f"{1 / ratio:.2f} times as fast"
    report.add(f"{name}: time over (b) compiled", ratio, "x", work.goal_compiled, note)
    if count > 1:
        note = f"{mean['c']:.2f} s, not {mean['a']:.2f}"
        ratio = mean["c"] / mean["a"]
        report.add(f"{name}: mean latency over (a)", ratio, "x", work.goal_latency, note)
        note = f"{mean['c']:.2f} s, not {mean['b']:.2f}"
        report.add(f"{name}: mean latency over (b)", mean["c"] / mean["b"], "x", None, note)
    took = {who: statistics.median(seconds) for who, seconds in single.items()}
    over = 100 * (took["engine"] / took["diffusers"] - 1)
    note = f"{took['engine']:.3f} s, not {took['diffusers']:.3f}"
    report.add(f"{name}: one request, overhead", over, "%", work.overhead, note)


def _mean_latency(seconds: Sequence[float]) -> float:
    """Of requests that come at once and run one after the other."""
    return statistics.mean(accumulate(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", default=",".join(SHAPES))
    parser.add_argument("--scale", choices=("real", "tiny"), default="real")
    parser.add_argument("--attention", default="auto", help="of (b) and (c)")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), vars(torch)[args.dtype]
    logging.basicConfig(level=logging.INFO)  # says what is compiled, and with which attention
    report = Report("diffusion_table_gpu")
    report.raw["versions"] = describe(device) | {"attention": args.attention, "scale": args.scale}
    failed = []
    for part in args.parts.split(","):
        began = time.perf_counter()
        try:
            model = TableModel(part, device, dtype, args.scale == "tiny")
            parameters = sum(p.numel() for p in model.denoiser.parameters())
            report.raw[f"parameters of {part}"] = parameters
            print(f"{part}: {parameters / 1e9:.1f} B, {time.perf_counter() - began:.0f} s to make")
            workloads = (TINY if args.scale == "tiny" else WORKLOADS)[part]
            measure(model, workloads, args.attention, report)
        except Exception:
            # The device is lent: what else can be measured is measured, and the failure told.
            traceback.print_exc()
            failed.append(part)
        model = None
        release(device)
        report.raw[f"seconds of {part}"] = time.perf_counter() - began
        report.finish()  # so that it is there, whatever comes next
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def release(device: torch.device) -> None:
    """Give back what the last model took, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
