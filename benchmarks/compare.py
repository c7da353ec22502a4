# SPDX-License-Identifier: Apache-2.0
"""The same requests through `vllm serve --omni` and through the reference behind a thin server.

    python benchmarks/compare.py images|chat|speech [--model MODEL] [--concurrency 1,4]
    python benchmarks/compare.py qwen-tts --baseline-python REF/bin/python

One server after the other on this machine, each warmed up, each asked by `vllm bench serve --omni`
with the same arguments and seed. Ratios above 1 are in favour of this project. Without `--model` it
is a tiny random checkpoint on any CPU, which shows that it works and little else: at that size a
reference has hardly anything to compute.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import servers
from common import WORK, Report

sys.path.insert(0, str(Path(__file__).parents[1]))

FLOOR = ("--kv-cache-memory-bytes", "64000000", "--max-model-len", "2048", "--enforce-eager")
"""Of tiny checkpoints; a real model gets `--serve-flags`."""


@dataclass(frozen=True)
class Kind:
    """What is compared.

    Attributes:
        backend: Of the benchmark.
        reference: Of `baseline.py`.
        tiny: Module and name of the tiny checkpoint.
        body: Of every request beside its text; lengths are fixed, so both sides do the same work.
        output_len: Tokens or frames of an answer.
        flags: Of the server of the tiny checkpoint.
    """

    backend: str
    reference: str
    tiny: tuple[str, str]
    body: dict[str, Any]
    output_len: int | None = None
    flags: tuple[str, ...] = ()


TINY, DIFFUSERS = "vllm_omni.testing.tiny", "vllm_omni.testing.diffusers_tiny"
KINDS = {
    "images": Kind(
        "openai-images-omni",
        "diffusers",
        (DIFFUSERS, "flux"),
        {"size": "64x64", "num_inference_steps": 8, "seed": 1},
    ),
    "chat": Kind(
        "openai-chat-omni",
        "omni",
        (TINY, "qwen3_omni_moe"),
        {
            "ignore_eos": True,
            "temperature": 0,
            "sampling_params_list": [
                {},
                {"temperature": 0, "max_tokens": 32, "min_tokens": 32},
                {},
            ],
        },
        16,
        FLOOR,
    ),
    "speech": Kind("openai-audio-speech", "csm", (TINY, "csm"), {"temperature": 0}, 32, FLOOR),
    "qwen-tts": Kind(
        "openai-audio-speech",
        "qwen-tts",
        (TINY, "qwen3_tts_custom_voice"),
        {"temperature": 0, "voice": "serena"},
        32,
        FLOOR,
    ),
}
RATIOS = (
    ("total_audio_duration_s", "sound made", False),
    ("request_throughput", "requests per second", False),
    ("audio_throughput", "seconds of sound per second", False),
    ("median_e2el_ms", "median latency", True),
    ("median_audio_playable_ms", "median time to the first playable sound", True),
    ("median_audio_rtf", "median real-time factor", True),
)
"""Field of the result, what it is, and whether less is better."""


@contextlib.contextmanager
def baseline(args: argparse.Namespace, kind: Kind, model: str) -> Iterator[str]:
    """The reference's server; its URL."""
    port = servers.free_port()
    script = Path(__file__).with_name("baseline.py")
    command = [args.baseline_python, str(script), kind.reference, model, "--port", str(port)]
    log = WORK / "baseline.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--dtype", args.dtype], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        while servers.health(url) != 200:
            if process.poll() is not None:
                raise SystemExit(f"the baseline did not start; see {log}")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def measure(args: argparse.Namespace, kind: Kind, model: str, url: str, side: str) -> list[Any]:
    """One result for each concurrency."""
    body = kind.body | args.extra_body
    options = [
        *("--base-url", url, "--backend", kind.backend, "--dataset-name", "sentences"),
        *("--model", model, "--served-model-name", servers.MODEL, "--extra-body", json.dumps(body)),
        *("--num-prompts", str(args.num_prompts), "--num-warmups", str(args.num_warmups)),
        *("--seed", str(args.seed), "--disable-tqdm", "--ready-check-timeout-sec", "60"),
        *("--save-result", "--result-dir", str(WORK)),
    ]
    if length := args.output_len or kind.output_len:
        options += ["--output-len", str(length)]
    prefix = f"compare-{args.kind}-{side}"
    options += ["--sweep-max-concurrency", ",".join(map(str, args.concurrency))]
    options += ["--result-filename", f"{prefix}.json"]
    vllm = str(Path(sys.executable).with_name("vllm"))
    subprocess.run([vllm, "bench", "serve", "--omni", *options], check=True)
    results = [
        json.loads((WORK / f"{prefix}-concurrency{concurrency}.json").read_text())
        for concurrency in args.concurrency
    ]
    if failed := sum(result["failed"] for result in results):
        raise SystemExit(f"{side}: {failed} requests failed")
    return results


def compare(args: argparse.Namespace, kind: Kind, model: str) -> Report:
    """Both sides, and their ratios."""
    report = Report(f"compare_{args.kind.replace('-', '_')}")
    with servers.served(Path(model), "--dtype", args.dtype, *args.serve_flags) as server:
        ours = measure(args, kind, model, server.url, "ours")
    with baseline(args, kind, model) as url:
        theirs = measure(args, kind, model, url, "baseline")
    report.raw |= {"model": model, "ours": ours, "baseline": theirs, "body": kind.body}
    for concurrency, our, their in zip(args.concurrency, ours, theirs, strict=True):
        for field, title, less in RATIOS:
            if not (our.get(field) and their.get(field)):
                continue
            ratio = their[field] / our[field] if less else our[field] / their[field]
            note = f"ours {our[field]:.4g}, {kind.reference} {their[field]:.4g}"
            report.add(f"{title} at {concurrency}", ratio, "x", note=note)
    return report


def numbers(text: str) -> tuple[int, ...]:
    """Several, with commas between them."""
    return tuple(int(each) for each in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", help="checkpoint; a tiny random one if unset")
    parser.add_argument("--baseline-python", default=sys.executable, help="who has the reference")
    parser.add_argument("--concurrency", type=numbers, default=(1, 4), metavar="N,...")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-warmups", type=int, default=1)
    parser.add_argument("--output-len", type=int, help="tokens or frames of an answer")
    parser.add_argument("--extra-body", type=json.loads, default={}, help="JSON, over the kind's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of both sides")
    parser.add_argument("--serve-flags", type=str.split, default=None, help="of vllm serve")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    kind = KINDS[args.kind]
    WORK.mkdir(parents=True, exist_ok=True)
    if args.serve_flags is None:
        args.serve_flags = [] if args.model else [*kind.flags]
    report = compare(args, kind, args.model or tiny(kind))
    report.finish() if args.save else report.print_table()


def tiny(kind: Kind) -> str:
    """The kind's random checkpoint."""
    from importlib import import_module

    module, name = kind.tiny
    return str(import_module(module).build(name, WORK / "tiny" / name))


if __name__ == "__main__":
    main()
