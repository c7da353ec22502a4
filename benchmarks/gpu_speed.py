# SPDX-License-Identifier: Apache-2.0
"""Part of `diffusion_gpu.py`: what batching gives on a device, and what the engine itself costs."""

import cProfile
import io
import pstats
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from common import Report
from diffusion_batching import Job, jobs
from diffusion_loop import steps_per_second
from gpu_models import Model, Timed

from tests.diffusion.parity import Unmeasured
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.stopwatch import stopwatch_for

CONCURRENCY = 16
REQUESTS = 40
"""Of the closed loop; the first and the last `CONCURRENCY` are not timed."""
STATIC_STEPS = 20
STATIC_SIZES = (1, 2, 4, 8, 16)
LONG, SHORT = 50, 4
LATENCY_RUNS = 5
ROUNDS = 2
"""Of everything in turns; the best of each counts. One where a round takes long."""
LARGE = 1024
"""Pixels."""
ENOUGH = 0.95


@contextmanager
def forwards_of(model: Model) -> Iterator[list[tuple[torch.Event, torch.Event]]]:
    """Events around each forward of the denoiser."""
    marks: list[tuple[torch.Event, torch.Event]] = []
    hooks = []
    if model.device.type == "cuda":

        def before(*_: Any) -> None:
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(True)))
            marks[-1][0].record()

        hooks.append(model.denoiser.register_forward_pre_hook(before))
        hooks.append(model.denoiser.register_forward_hook(lambda *_: marks[-1][1].record()))
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def static(model: Model, size: int, steps: int) -> tuple[float, float]:
    """Steps per second of a static batch, and the median seconds of its forwards."""
    batch = [Job(job.prompt, steps, job.seed) for job in jobs(size)]
    with forwards_of(model) as marks:
        seconds, _ = model.stock(batch)
    took = [before.elapsed_time(after) / 1e3 for before, after in marks]
    return steps * size / seconds, statistics.median(took or [seconds / steps])


def closed_loop(model: Model, engine: Engine, work: Sequence[Job]) -> float:
    """Steps per second with `CONCURRENCY` requests at all times."""
    return steps_per_second(engine, work, model.message, CONCURRENCY, lambda: finish(model.device))


def burst(model: Model, engine: Engine, work: Sequence[Job]) -> float:
    """Seconds until requests that come at once are all done."""
    began = time.perf_counter()
    for number, job in enumerate(work):
        engine.add(str(number), model.message(job))
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
    return time.perf_counter() - began


def short_latency(model: Model, company: int) -> float:
    """Seconds of a 4-step request that comes while so many of 50 steps run."""
    engine = model.engine()
    for i, job in enumerate(jobs(company, seed=1)):
        engine.add(f"long {i}", model.message(Job(job.prompt, LONG, job.seed)))
    for _ in range(4 * company):
        engine.step()
    began = time.perf_counter()
    engine.add("short", model.message(Job("a small cat", SHORT, 99)))
    while True:
        if any(e.request_id == "short" and e.finished for e in engine.step()):
            return time.perf_counter() - began


def throughput(model: Model, report: Report) -> None:
    """Mixed requests against diffusers, one at a time and in static batches."""
    size, work = model.size, jobs(REQUESTS)
    for calls in STATIC_SIZES:
        static(model, calls, steps=3)  # warm
    burst(model, model.engine(), [Job(j.prompt, 5, j.seed) for j in work[:CONCURRENCY]])

    alone = single = mixed = at_once = 0.0
    batches: dict[int, tuple[float, float]] = {}
    for _ in range(1 if size >= LARGE else ROUNDS):
        some = work[:4]
        seconds = sum(model.stock([job])[0] for job in some)
        alone = max(alone, sum(job.steps for job in some) / seconds)
        engine = model.engine()
        seconds = sum(burst(model, engine, [job]) for job in some)
        single = max(single, sum(job.steps for job in some) / seconds)
        for calls in STATIC_SIZES:
            batches[calls] = max(batches.get(calls, (0.0, 0.0)), static(model, calls, STATIC_STEPS))
        first = work[:CONCURRENCY]
        seconds = burst(model, model.engine(), first)
        at_once = max(at_once, sum(job.steps for job in first) / seconds)
        cost = Timed()
        engine = model.engine(cost)
        began = time.perf_counter()
        mixed = max(mixed, closed_loop(model, engine, work))
        wall = time.perf_counter() - began
    busy = sum(seconds for *_, seconds in cost.seen) / wall
    best = max(speed for speed, _ in batches.values())
    report.raw[f"speed {size} px"] = {
        "steps_per_s": {
            "diffusers alone": alone,
            "engine, one request": single,
            "static": {calls: speed for calls, (speed, _) in batches.items()},
            "16 at once": at_once,
            "16 at all times": mixed,
        },
        "forward_s": {calls: seconds for calls, (_, seconds) in batches.items()},
        "batch_sizes": engine.forward_sizes,
        "busy": busy,
        **_learned(model, cost, {calls: seconds for calls, (_, seconds) in batches.items()}),
    }
    note = f"{mixed:.0f} steps/s; alone {alone:.0f}, static {best:.0f}; device busy {busy:.0%}"
    report.add(f"{size} px: mixed over (a) alone", mixed / alone, "x", note=note)
    report.add(f"{size} px: mixed over (b) best static batch", mixed / best, "x")
    report.add(f"{size} px: engine over diffusers, one request", single / alone, "x")
    _overheads(model, report)


def _overheads(model: Model, report: Report, rounds: int = 5) -> None:
    """What a request alone takes more in the engine than in diffusers: per step, and beside."""
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(rounds):
        for steps in (SHORT, SHORT + 20):
            job = Job(f"a small cat, {number}", steps, number)
            seconds["diffusers", steps].append(model.stock([job])[0])
            seconds["engine", steps].append(burst(model, model.engine(), [job]))
    short, long = SHORT, SHORT + 20
    took = {key: statistics.median(each) for key, each in seconds.items()}
    step_s = {n: (took[n, long] - took[n, short]) / 20 for n in ("diffusers", "engine")}
    rest_s = {n: took[n, short] - SHORT * step_s[n] for n in step_s}
    report.raw[f"one request {model.size} px"] = {"step_s": step_s, "rest_s": rest_s}
    more = (step_s["engine"] - step_s["diffusers"]) * 1e3
    note = f"of {step_s['engine'] * 1e3:.1f}; beside steps {rest_s['engine'] * 1e3:.0f} ms, "
    note += f"diffusers {rest_s['diffusers'] * 1e3:.0f}"
    report.add(f"{model.size} px: a step alone, over diffusers", more, "ms", note=note)


def _learned(model: Model, cost: Timed, truth: dict[int, float]) -> dict[str, Any]:
    """What the engine's stopwatch said of forwards and how big it made them in the end."""
    name = type(model.denoiser).__qualname__
    seen = [(calls, seconds) for method, calls, seconds in cost.seen if method == name]
    times: defaultdict[int, list[float]] = defaultdict(list)
    for calls, seconds in seen:
        times[calls].append(seconds)
    fastest = max(calls / seconds for calls, seconds in truth.items())
    enough = min(c for c, seconds in truth.items() if c / seconds >= ENOUGH * fastest)
    others: defaultdict[str, list[float]] = defaultdict(list)
    for method, calls, seconds in cost.seen:
        others[f"{method} of {calls}"].append(seconds)
    return {
        "denoiser_s_by_calls": {c: statistics.median(times[c]) for c in sorted(times)},
        "enough_by_diffusers": enough,
        "sizes_late": Counter(calls for calls, _ in seen[len(seen) // 2 :]).most_common(),
        "others_s": {n: statistics.median(s) for n, s in others.items() if name not in n},
    }


def latency(model: Model, report: Report) -> None:
    """A short request among long ones."""
    quiet = [short_latency(model, 0) for _ in range(LATENCY_RUNS)]
    among = [short_latency(model, CONCURRENCY - 1) for _ in range(LATENCY_RUNS)]
    report.raw[f"latency {model.size} px"] = {"alone": quiet, "among": among}
    report.add(
        f"{model.size} px: 4 steps among fifteen of 50",
        statistics.median(among) / statistics.median(quiet),
        "x",
        note=f"alone {statistics.median(quiet) * 1e3:.0f} ms",
    )


def profile(model: Model, together: Sequence[int]) -> None:
    """Print where the host's time goes in diffusers and in the engine; a profile slows it down."""
    engine = model.engine()
    burst(model, engine, jobs(4, seed=5))
    work = [Job(job.prompt, STATIC_STEPS, job.seed) for job in jobs(CONCURRENCY, seed=6)]
    model.stock(work[:1])
    _profiled(f"diffusers alone, {model.size} px", lambda: model.stock(work[:1]))
    for count in together:
        name = f"{count} at once, {model.size} px"
        _profiled(name, partial(burst, model, engine, work[:count]))


def _profiled(name: str, run: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(run)
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(70)
        print(f"profile, {name}\n{text.getvalue()}")


def kernels(model: Model) -> None:
    """Print what the device does for one request, in diffusers and in the engine."""
    job = jobs(1, seed=6)[0]
    job = Job(job.prompt, 8, job.seed)
    engines = {name: model.engine(foresee=name) for name in (False, True)}
    runs = {"diffusers": lambda: model.stock([job])} | {
        f"engine, foresee={name}": partial(burst, model, engine, [job])
        for name, engine in engines.items()
    }
    for name, run in runs.items():
        run()
        with torch.profiler.profile() as profiler:
            run()
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=22)
        print(f"kernels, {name}, {model.size} px\n{table}")


def guidance(model: Model, report: Report, rounds: int = 3) -> None:
    """One guided request alone, with its second calls foreseen and not."""
    job, speeds = Job("a red cat on a green hill", STATIC_STEPS, 1), defaultdict(list)
    sizes, engines = {}, {foresee: model.engine(foresee=foresee) for foresee in (False, True)}
    for number in range(rounds + 1):
        for foresee, engine in engines.items():
            seconds = burst(model, engine, [job])
            if number:
                speeds[foresee].append(STATIC_STEPS / seconds)
            sizes[foresee] = engine.forward_sizes
        seconds, _ = model.stock([job])
        if number:
            speeds["diffusers"].append(STATIC_STEPS / seconds)
    apart, together, stock = (statistics.median(speeds[k]) for k in (False, True, "diffusers"))
    report.raw[f"guidance {model.size} px"] = {
        "steps_per_s": {str(name): each for name, each in speeds.items()},
        "forward_sizes": {str(name): each for name, each in sizes.items()},
    }
    note = f"{together:.1f} steps/s, not {apart:.1f}, diffusers {stock:.1f}"
    report.add(f"Qwen-Image, {model.size} px: foreseen over not", together / apart, "x", note=note)


def out_of_memory(model: Model, report: Report) -> None:
    """Batches that do not fit are halved, and nobody notices."""
    work = [Job(job.prompt, 4, job.seed) for job in jobs(CONCURRENCY)]
    if model.device.type == "cpu":
        return
    scheduler = CallScheduler(CONCURRENCY, cost=Unmeasured())
    engine = Engine(programs.image, model.loaded, device=model.device, scheduler=scheduler)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    burst(model, engine, work)
    most = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(model.device).total_memory
    torch.cuda.set_per_process_memory_fraction((resting + 0.45 * (most - resting)) / total)
    try:
        engine = Engine(programs.image, model.loaded, device=model.device, max_batch=CONCURRENCY)
        burst(model, engine, work)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report.raw["out of memory"] = {"bytes": [resting, most], "sizes": engine.forward_sizes}
    report.add("requests answered with too little memory", len(work), "", note="of 16")


def overhead(device: torch.device, report: Report) -> None:
    """What two timed forwards' events cost the host: a stopwatch alone."""
    watch, times = stopwatch_for(device), []
    for _ in range(200):
        times.append(time.perf_counter())
        with watch.timing(None):  # type: ignore[arg-type]
            pass
        list(watch.results())
    report.raw["stopwatch_s"] = statistics.median(b - a for a, b in pairwise(times))
