# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni-30B-A3B's shape on one GPU, text and sound, against transformers in the same run.

    python benchmarks/omni_gpu.py [--arms mps,vllm,transformers] [--concurrency 1,8,32,64]

Random weights in bfloat16; each answer has 64 tokens of text and 63 codec frames (5 s of sound),
in all arms. Closed loop: so many requests at all times. Each arm is a process of its own. The arms
before the last are steps from a plain deployment to the whole one:

    eager         no CUDA graphs, no async_chunk, synchronous scheduling
    graphs        + CUDA graphs
    async_chunk   + the talker starts with the thinker's first token
    async_output  + asynchronous scheduling
    mps           + stages run on the device at the same time (`cuda_mps`): the whole deployment
    replicas      + a second talker

vllm is vLLM's own engine of the same checkpoint, for text-only requests, which the last deployment
gets as well. transformers gets requests one at a time, and, as it can batch, eight in one batch:
the better one of both is what a request in a closed loop of eight waits for.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import PROMPT, WORK, Report, tiny_checkpoint

TOKENS = 64
FRAMES = 63
SOUND_S = FRAMES * 0.08
LEAST_SAMPLES = (FRAMES - 2) * 1920
"""The decoder cuts less than two frames off."""
BATCH = 8
RUNGS = ("eager", "graphs", "async_chunk", "async_output", "mps", "replicas")
ARMS = (*RUNGS, "transformers", "vllm")
SHARES = {"thinker": 0.62, "talker": 0.16, "code2wav": 0.06}
"""Of the device's memory."""
WHOLE = "mps"
"""The rung that the goals are for."""
TEXT_AT_ONCE = (1, 32)
"""Concurrencies of text-only requests."""
TRACE_AFTER_S, TRACE_S = 1.5, 0.7
ROUNDS = 4
"""Requests per place of the closed loop."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Seconds from a request's start to its first sound and to its end.

    Attributes:
        stages: Of each stage: its name, when it got the request, had its first and its last output.
    """

    first: float
    end: float
    stages: Sequence[tuple[str, float, float | None, float | None]] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop: its seconds, and what its requests took."""

    wall_s: float
    heard: list[Heard]


QUICK = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
}


def deployment(rung: str, tiny: bool, quick: bool = False) -> dict[str, Any]:
    """Keys on top of the shipped deploy file, up to a rung."""
    reached = RUNGS.index(rung)
    device = {"devices": "cpu" if tiny else "0", "load_format": "auto" if tiny else "dummy"}
    stages: list[dict[str, Any]] = [
        {"stage_id": number, **device, "max_num_seqs": 64} for number in range(3)
    ]
    if tiny:
        return {"base_config": "qwen3_omni_moe.yaml", "async_chunk": reached >= 2, "stages": stages}
    for stage, share in zip(stages, SHARES.values(), strict=True):
        stage["gpu_memory_utilization"] = share
    for stage in stages[:2]:
        stage["enforce_eager"] = reached < RUNGS.index("graphs")
        stage["async_scheduling"] = reached >= RUNGS.index("async_output")
        stage["max_model_len"] = 4096
        if quick:
            stage["compilation_config"] = QUICK
    stages[0]["limit_mm_per_prompt"] = {"image": 0, "video": 0, "audio": 0}
    stages[2]["enforce_eager"] = reached < RUNGS.index("graphs")
    if rung == "replicas":
        stages[1] |= {"num_replicas": 2, "gpu_memory_utilization": SHARES["talker"] / 2}
    return {
        "base_config": "qwen3_omni_moe.yaml",
        "async_chunk": reached >= RUNGS.index("async_chunk"),
        "cuda_mps": reached >= RUNGS.index("mps"),
        "stages": stages,
    }


def checkpoint(tiny: bool) -> Path:
    """The real sizes, without weights; or the tests' one."""
    from gpu_checkpoints import qwen3_omni

    return tiny_checkpoint() if tiny else qwen3_omni(WORK / "qwen3_omni_30b")


def trace_into(config: dict[str, Any], folder: str) -> None:
    """Have thinker and talker ready to be traced."""
    for stage in config["stages"][:2]:
        stage["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": f"{folder}/{stage['stage_id']}",
            "torch_profiler_with_stack": False,
        }


async def closed_loop(ask: Callable[[], Awaitable[Heard]], at_once: int, requests: int) -> Loop:
    """So many requests, so many at all times."""
    left = iter(range(requests))

    async def one_after_another() -> list[Heard]:
        return [await ask() for _ in left]

    began = time.perf_counter()
    groups = await asyncio.gather(*(one_after_another() for _ in range(at_once)))
    return Loop(time.perf_counter() - began, [each for group in groups for each in group])


class Asking:
    """Prompts that differ from one another, to a deployment or to vLLM's own engine."""

    def __init__(self) -> None:
        self._count = 0

    def prompt(self) -> dict[str, str]:
        """The next one."""
        self._count += 1
        return {"prompt": PROMPT.replace("hello", f"{self._count} hello")}

    async def speech(self, omni: Any) -> Heard:
        """Ask a pipeline for text and sound."""
        from pipelines import Lengths, OmniPipeline

        first = 0.0
        stages: list[tuple[str, float, float | None, float | None]] = []
        started = time.perf_counter()

        def note(output: Any) -> None:
            nonlocal first
            if output.audio is not None and not first:
                first = time.perf_counter() - started
            for stage in output.stage_metrics:
                times = (stage.submitted_s, stage.first_output_s, stage.finished_s)
                stages.append((stage.stage, *times))

        samples = await OmniPipeline(omni, Lengths(TOKENS, FRAMES), note).ask(self.prompt())
        assert samples > LEAST_SAMPLES, samples
        return Heard(first, time.perf_counter() - started, stages)

    async def text(self, outputs: Callable[[dict[str, str], Any], AsyncIterator[Any]]) -> Heard:
        """Ask for text alone; `outputs` takes a prompt and the sampling parameters."""
        from pipelines import Lengths

        first, tokens, started = 0.0, 0, time.perf_counter()
        async for output in outputs(self.prompt(), Lengths(TOKENS, 0).params()[0]):
            first = first or time.perf_counter() - started
            tokens += len(output.outputs[0].token_ids)
        assert tokens == TOKENS, tokens
        return Heard(first, time.perf_counter() - started)


async def text_loops(ask: Callable[[], Awaitable[Heard]]) -> dict[int, Loop]:
    """Text-only requests, alone and many at once, warmed up."""
    found = {}
    for at_once in TEXT_AT_ONCE:
        await closed_loop(ask, at_once, at_once)
        found[at_once] = await closed_loop(ask, at_once, max(16, ROUNDS * at_once))
        mean = statistics.mean(each.end for each in found[at_once].heard)
        print(f"text at {at_once}: {mean:.4f} s", flush=True)
    return found


def processor_seconds() -> dict[str, float]:
    """Processor time of this process and of those that it started, since each began."""
    here = psutil.Process()
    found = {"front end, orchestrator and client": here.cpu_times()}
    found |= {f"{each.name()} {each.pid}": each.cpu_times() for each in here.children(True)}
    return {name: times.user + times.system for name, times in found.items()}


def serve(
    config: dict[str, Any], concurrencies: list[int], tiny: bool, out: Path, trace: bool
) -> dict[str, Any]:
    """What requests of one deployment took, by concurrency; written as it is measured."""
    from vllm_omni import AsyncOmni
    from vllm_omni.config.build import build_plan

    began = time.perf_counter()
    plan = build_plan(str(checkpoint(tiny)), deploy_config=config)
    omni = AsyncOmni.from_plan(plan)
    found: dict[str, Any] = {"start_s": time.perf_counter() - began, "at": {}, "processor_s": {}}
    print(f"started in {found['start_s']:.0f} s", flush=True)
    asking = Asking()

    async def main() -> None:
        speech = partial(asking.speech, omni)
        await closed_loop(speech, 1, 2)
        await closed_loop(speech, max(concurrencies), max(concurrencies))  # warm
        for at_once in concurrencies:
            before = processor_seconds()
            loop = await closed_loop(speech, at_once, max(8, ROUNDS * at_once))
            found["at"][at_once] = asdict(loop)
            found["processor_s"][at_once] = {
                name: seconds - before[name] for name, seconds in processor_seconds().items()
            }
            out.write_text(json.dumps(found))
            ends = statistics.mean(each.end for each in loop.heard)
            first = statistics.median(each.first for each in loop.heard)
            print(f"at {at_once}: {ends:.2f} s, first {first * 1e3:.0f} ms", flush=True)
            for stage in sorted(loop.heard, key=lambda each: each.end)[len(loop.heard) // 2].stages:
                print("   ", *stage, flush=True)
        if trace:
            loop = asyncio.ensure_future(closed_loop(speech, 64, 2 * 64))
            await asyncio.sleep(TRACE_AFTER_S)
            await omni.start_profile()
            await asyncio.sleep(TRACE_S)
            await omni.stop_profile()
            await loop
        outputs = partial(omni.generate, output_modalities=["text"])
        loops = await text_loops(partial(asking.text, outputs))
        found["text"] = {at_once: asdict(loop) for at_once, loop in loops.items()}
        out.write_text(json.dumps(found))
        await asyncio.to_thread(omni.shutdown, 5)

    asyncio.run(main())
    return found


def plain(tiny: bool, quick: bool) -> dict[str, Any]:
    """Text-only requests to vLLM's own engine of the same checkpoint, which is the thinker."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    thinker = deployment(WHOLE, tiny, quick)["stages"][0]
    options = {key: value for key, value in thinker.items() if key not in ("stage_id", "devices")}
    if tiny:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28, "max_model_len": 4096}
    began = time.perf_counter()
    asking = Asking()

    async def main() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint(tiny)), **options))
        found: dict[str, Any] = {"start_s": time.perf_counter() - began}

        def outputs(prompt: dict[str, str], params: Any) -> AsyncIterator[Any]:
            return engine.generate(prompt, params, uuid.uuid4().hex)

        loops = await text_loops(partial(asking.text, outputs))
        found["text"] = {at_once: asdict(loop) for at_once, loop in loops.items()}
        engine.shutdown()
        return found

    return asyncio.run(main())


def generate(tiny: bool) -> dict[str, Any]:
    """Seconds that transformers takes for one request, and for a batch."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3OmniMoeForConditionalGeneration
    from transformers.initialization import no_init_weights

    folder = checkpoint(tiny)
    config = AutoConfig.from_pretrained(folder)
    device = torch.device("cpu" if tiny else "cuda")
    began = time.perf_counter()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    with device, no_init_weights():
        model = Qwen3OmniMoeForConditionalGeneration(config).eval()
        model.talker.config.speaker_id = dict(config.talker_config.speaker_id)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.uniform_(-1e-3, 1e-3)
    found: dict[str, Any] = {"start_s": time.perf_counter() - began, "seconds": {}}
    print(f"transformers: started in {found['start_s']:.0f} s", flush=True)
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids.to(device)

    def run(rows: int, frames: int) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            _, sounds = model.generate(
                input_ids=ids.expand(rows, -1),
                attention_mask=torch.ones_like(ids).expand(rows, -1),
                speaker="ethan",
                thinker_max_new_tokens=TOKENS,
                thinker_do_sample=False,
                thinker_eos_token_id=None,
                thinker_pad_token_id=0,
                talker_do_sample=False,
                talker_repetition_penalty=1.0,
                # The frame of the last code is lost (its other codes are made in the next step).
                talker_max_new_tokens=frames + 1,
                talker_min_new_tokens=frames + 1,
            )
        assert frames < FRAMES or all(each.shape[-1] > LEAST_SAMPLES for each in sounds)
        return time.perf_counter() - began

    run(1, 4)  # warm
    for rows in (1, BATCH):
        found["seconds"][rows] = run(rows, FRAMES)
        print(f"transformers, {rows} at once: {found['seconds'][rows]:.1f} s", flush=True)
    return found


def tell(report: Report, arm: str, found: dict[str, Any], whole: bool) -> None:
    """Figures of one deployment."""
    for at_once, measured in found["at"].items():
        heard = [Heard(**each) for each in measured["heard"]]
        firsts = [each.first * 1e3 for each in heard]
        completion = statistics.mean(each.end for each in heard)
        rate = len(heard) / measured["wall_s"]
        alone, full = whole and at_once == "1", whole and at_once == "64"
        note = f"{len(heard)} requests, {rate:.2f} a second"
        report.add(f"{arm} at {at_once}: mean completion", completion, "s", note=note)
        goal = 200 if alone else 650 if full else None
        note = f"{min(firsts):.0f} to {max(firsts):.0f}"
        report.add(
            f"{arm} at {at_once}: first sound, mean", statistics.mean(firsts), "ms", goal, note
        )
        if full:
            report.add(f"{arm} at {at_once}: RTF", completion / SOUND_S, "", 0.45)
            report.add(f"{arm} at {at_once}: seconds per request", 1 / rate, "s", 1 / 6)


def compare(report: Report, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Mean completion time at eight requests, ours as a share of transformers'."""
    measured = ours["at"].get(str(BATCH))
    if measured is None:
        return
    seconds = theirs["seconds"]
    best = min(BATCH * seconds["1"], seconds[str(BATCH)])
    completion = statistics.mean(each["end"] for each in measured["heard"])
    note = f"{best / completion:.1f} times lower; transformers {best:.1f} s"
    report.add("at 8: completion / transformers'", completion / best, "", 1 / 12, note)


def compare_text(report: Report, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Text-only requests: ours over vLLM's, latency and time per request."""
    for at_once, plain in theirs["text"].items():
        omni = ours["text"][at_once]
        means = [statistics.mean(each["end"] for each in loop["heard"]) for loop in (omni, plain)]
        note = f"{means[0] * 1e3:.1f} ms; vLLM {means[1] * 1e3:.1f} ms"
        report.add(f"text at {at_once}: latency / vLLM's", means[0] / means[1], "", 1.02, note)
        ratio = omni["wall_s"] / plain["wall_s"]
        report.add(f"text at {at_once}: time per request / vLLM's", ratio, "", 1.02)


def run_arm(arm: str, options: list[str]) -> dict[str, Any]:
    """One arm in a process of its own."""
    WORK.mkdir(parents=True, exist_ok=True)
    out = WORK / f"omni_gpu_{arm}.json"
    command = [sys.executable, __file__, "--only", arm, "--out", str(out), *options]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=f"{WHOLE},vllm,transformers", help=", ".join(ARMS))
    parser.add_argument("--concurrency", default="1,8,32,64")
    parser.add_argument("--tiny", action="store_true", help="the tests' checkpoint on the CPU")
    parser.add_argument("--quick", action="store_true", help="no torch.compile, few graphs")
    parser.add_argument("--trace", help="folder for the profiler's traces at 64 (trace_idle.py)")
    parser.add_argument("--only", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only == "transformers":
        args.out.write_text(json.dumps(generate(args.tiny)))
        return
    if args.only == "vllm":
        args.out.write_text(json.dumps(plain(args.tiny, args.quick)))
        return
    if args.only is not None:
        config = deployment(args.only, args.tiny, args.quick)
        if args.trace is not None:
            trace_into(config, args.trace)
        at_once = [int(each) for each in args.concurrency.split(",")]
        serve(config, at_once, args.tiny, args.out, args.trace is not None)
        return
    report = Report("omni_gpu" + "_tiny" * args.tiny + "_quick" * args.quick)
    options = ["--concurrency", args.concurrency]
    options += ["--tiny"] * args.tiny + ["--quick"] * args.quick
    options += ["--trace", args.trace] if args.trace else []
    ours: dict[str, Any] | None = None
    for arm in args.arms.split(","):
        found = report.raw[arm] = run_arm(arm, options)
        if arm in RUNGS:
            ours = found if arm == WHOLE else ours
            tell(report, arm, found, whole=arm == WHOLE)
        elif ours is not None:
            (compare_text if arm == "vllm" else compare)(report, ours, found)
        report.finish()


if __name__ == "__main__":
    main()
