# SPDX-License-Identifier: Apache-2.0
"""What orchestration costs: a pipeline through `AsyncOmni` against its stages' engines driven bare.

    python benchmarks/orchestration_overhead.py

Two equal deployments run side by side in one process: one behind `AsyncOmni`, one driven by
`BarePipeline` (see `pipelines.py`). Requests for text and sound of fixed lengths go to them in
turns, so that whatever disturbs the machine meets both; a figure is the median over pairs of
neighbouring rounds. The third part measures the orchestrator's own CPU time per engine step.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from common import (
    PROMPT,
    ROOT,
    Report,
    large_checkpoint,
    median,
    paired_overhead,
    spread,
    tiny_checkpoint,
)

Ask = Callable[[Any], Awaitable[int]]

PARTS = ("tiny", "large", "cpu")
LENGTHS = {"tiny": (48, 48), "large": (24, 24), "cpu": (48, 48)}
GOALS = {"tiny": 20.0, "large": 5.0}
STEP_GOAL_MS = 0.2
CONCURRENT = 16
PART_TIMEOUT_S = 900
FULL_STEP = 12
"""Outputs in a step from which on it counts as a step of 16 requests (some start, some end)."""


async def one_by_one(ask: Ask, requests: int) -> float:
    """Mean seconds per request, one after the other."""
    start = time.perf_counter()
    for _ in range(requests):
        assert await ask({"prompt": PROMPT}) > 0
    return (time.perf_counter() - start) / requests


async def at_once(ask: Ask, requests: int) -> float:
    """Seconds per request with `CONCURRENT` clients in a closed loop of `requests` each."""
    start = time.perf_counter()
    await asyncio.gather(*(one_by_one(ask, requests) for _ in range(CONCURRENT)))
    return (time.perf_counter() - start) / (CONCURRENT * requests)


async def alternate(bare: Ask, omni: Ask, rounds: int, requests: int, measure: Any) -> Any:
    """Rounds in turns, the order changing each time; seconds per request of (bare, omni)."""
    times: dict[Ask, list[float]] = {bare: [], omni: []}
    for number in range(rounds):
        for ask in (bare, omni) if number % 2 == 0 else (omni, bare):
            times[ask].append(await measure(ask, requests))
    return times[bare], times[omni]


def compare(part: str, rounds: int) -> dict[str, Any]:
    """Overhead on one checkpoint."""
    from pipelines import BarePipeline, Lengths, OmniPipeline, Stages

    model = tiny_checkpoint() if part == "tiny" else large_checkpoint()
    lengths = Lengths(*LENGTHS[part])
    one, other = Stages.start(model), Stages.start(model)
    bare, omni = BarePipeline(one, lengths), OmniPipeline(other.omni(), lengths)

    async def main() -> dict[str, Any]:
        await alternate(bare.ask, omni.ask, 2, 1, one_by_one)
        await alternate(bare.ask, omni.ask, 1, 1, at_once)
        omni.steps.clear()
        requests = 5 if part == "tiny" else 2
        alone = await alternate(bare.ask, omni.ask, 2 * rounds, requests, one_by_one)
        steps_alone = {name: median(values) for name, values in omni.steps.items()}
        omni.steps.clear()
        together = await alternate(bare.ask, omni.ask, rounds, 3 if part == "tiny" else 1, at_once)
        steps = {name: median(values) for name, values in omni.steps.items()}
        await bare.close()
        await omni.close()
        return {"1": [*alone, steps_alone], str(CONCURRENT): [*together, steps]}

    return asyncio.run(main())


def orchestrator_cpu(rounds: int) -> dict[str, Any]:
    """CPU of the orchestrator at 16 requests; see `metered.py` for what is counted."""
    from metered import METER, MeteredEngine
    from pipelines import Lengths, OmniPipeline, Stages

    stages = Stages.start(tiny_checkpoint())
    omni = OmniPipeline(stages.omni(MeteredEngine), Lengths(*LENGTHS["cpu"]))

    async def main() -> dict[str, Any]:
        await at_once(omni.ask, 1)
        METER.reset()
        for _ in range(rounds):
            await at_once(omni.ask, 3)
        found = METER.result(FULL_STEP)
        await omni.close()
        return found

    return asyncio.run(main())


def in_own_process(part: str, rounds: int) -> Any:
    """Run a part in a process of its own: stages are forked before any thread or loop exists."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--part", part, "--rounds", str(rounds)]
        log = ROOT / ".work" / "bench" / f"overhead_{part}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            child = psutil.Popen(
                [*command, "--out", str(out)], stdout=output, stderr=subprocess.STDOUT
            )
        try:
            code = child.wait(PART_TIMEOUT_S)
        finally:
            end_tree(child)
        if code != 0:
            raise SystemExit(f"part {part} failed, see {log}")
        return json.loads(out.read_text())


def end_tree(process: psutil.Popen) -> None:
    """Kill a process that has not ended by itself, and its stages."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(10)


def report_overhead(report: Report, part: str, found: dict[str, Any]) -> None:
    """Rows of one checkpoint."""
    for concurrency, (bare, omni, steps) in found.items():
        overheads = paired_overhead(bare, omni)
        step_ms = ", ".join(f"{name} {1000 * took:.1f} ms" for name, took in steps.items())
        name = f"{part}: overhead at concurrency {concurrency}"
        note = (
            f"{1000 * median(bare):.1f} -> {1000 * median(omni):.1f} ms/request; "
            f"pairs {spread(overheads)}; step: {step_ms}"
        )
        report.add(name, median(overheads), "%", GOALS[part], note)


def report_cpu(report: Report, found: dict[str, Any]) -> None:
    """Rows of the third part."""
    report.add(
        f"orchestrator CPU per step of >= {FULL_STEP} outputs",
        found["own_ms_full_step"],
        "ms",
        STEP_GOAL_MS,
        f"{found['full_steps']} steps of {found['outputs_per_full_step']:.1f} outputs",
    )
    report.add(
        "orchestrator CPU per step, all steps",
        found["own_ms_step"],
        "ms",
        STEP_GOAL_MS,
        f"{found['steps']} steps of {found['outputs_per_step']:.1f} outputs",
    )
    report.add("  to start a request", found["own_ms_start"], "ms", note="once per request")
    report.add(
        "  not counted: replicas' front ends", found["replica_ms_step"], "ms", note="per step"
    )
    for stage, cost in found["own_ms_by_stage"].items():
        report.add(f"  full steps of {stage}", cost, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="pairs of rounds per figure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.part:
        part, rounds = arguments.part, arguments.rounds
        found = orchestrator_cpu(rounds) if part == "cpu" else compare(part, rounds)
        arguments.out.write_text(json.dumps(found))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that `finally` ends the stages.
    report = Report("orchestration_overhead")
    for part in arguments.parts:
        found = report.raw[part] = in_own_process(part, arguments.rounds)
        if part == "cpu":
            report_cpu(report, found)
        else:
            report_overhead(report, part, found)
    report.finish()


if __name__ == "__main__":
    main()
