# SPDX-License-Identifier: Apache-2.0
"""Step caches against none: how much work they leave out, and how much the picture changes.

    python benchmarks/diffusion_caches.py [FAMILY ...]

For each family and cache, over the same requests with 30 steps:

- the share of the work in the transformer's blocks (multiplications of its linear layers) that is
  left out;
- the mean PSNR of the pictures against those without a cache (peak 1);
- the speed as a multiple of that without a cache, for one request at a time and for eight. With a
  cache each forward is of one request, without one they are batched.

`--no-times` leaves the speeds out, for a machine that is not quiet.

The models are tiny and random: they have few blocks, and what those do changes much from step to
step. The figures say what the mechanism costs and that it works, not what a real model gains.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import WORK, Report
from torch import nn

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.programs.diffusers.load import load
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.generation import PARAMETERS
from vllm_omni.testing import diffusers_tiny

FAMILIES = ("flux", "qwen_image")
STEPS = 30
REQUESTS = 8
PROMPTS = ("a red cat", "a blue dog", "a green hill", "old snow", "the sea at night", "a tree")
CACHES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    # Far above what trained models need (0.05 to 0.2): with random weights more changes.
    "first_block": ("first_block", {"threshold": 1.0}),
    # Made for a model whose blocks keep their magnitude, as none here is trained.
    "mag_cache": ("mag_cache", {"mag_ratios": [1.0] * STEPS, "num_inference_steps": STEPS}),
    "taylorseer": ("taylorseer", {"cache_interval": 3, "taylor_factors_dtype": "float32"}),
    # Of two blocks, the first is always computed, so that at most half can be left out.
    "cache_dit": ("cache_dit", {"residual_diff_threshold": 0.9}),
    "cache_dit_taylorseer": (
        "cache_dit",
        {"residual_diff_threshold": 0.9, "enable_taylorseer": True},
    ),
    "cache_dit_scm": (
        "cache_dit",
        {"scm_steps_mask_policy": "medium", "scm_steps_policy": "static"},
    ),
}
"""Name -> `cache_backend`, `cache_config`."""
EXACT_DB = 120.0
"""Shown for equal pictures."""


def messages(family: str, size: int) -> list[Message]:
    """The requests."""
    example = diffusers_tiny.recipe(family).examples[0]
    own = {name: value for name, value in example.fixed.items() if name in PARAMETERS}
    extra = {name: value for name, value in example.fixed.items() if name not in PARAMETERS}
    params = {**own, "height": size, "width": size, "num_inference_steps": STEPS}
    return [
        Message(
            {
                "prompt": PROMPTS[i % len(PROMPTS)],
                "seed": i,
                "params": {**params, "seed": i, "output_type": "pt", "extra_args": extra},
            },
            final=True,
        )
        for i in range(REQUESTS)
    ]


def run(loaded: Loaded, requests: Sequence[Message], at_a_time: int) -> list[torch.Tensor]:
    """What the engine makes of the requests, in order."""
    engine = Engine(programs.image, loaded)
    later = iter(enumerate(requests))
    made: dict[int, torch.Tensor] = {}
    for number, message in (next(later) for _ in range(at_a_time)):
        engine.add(str(number), message)
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
            if emission.tensors is not None:
                (made[int(emission.request_id)],) = emission.tensors.values()
            if emission.finished and (following := next(later, None)) is not None:
                engine.add(str(following[0]), following[1])
    return [made[number] for number in sorted(made)]


@contextmanager
def counted(loaded: Loaded) -> Iterator[list[int]]:
    """Notes the multiplications of each linear layer in blocks of the denoiser."""
    work: list[int] = []

    def note(layer: nn.Linear, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        work.append(given[0].numel() * layer.out_features)

    blocks = [
        child
        for child in loaded.components["transformer"].module.children()
        if isinstance(child, nn.ModuleList)
    ]
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield work
    finally:
        for hook in hooks:
            hook.remove()


def psnr(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """Decibels, of values from 0 to 1."""
    error = (made - wanted).square().mean().item()
    return min(EXACT_DB, -10 * math.log10(error)) if error else EXACT_DB


def seconds(loaded: Loaded, requests: Sequence[Message], at_a_time: int, rounds: int) -> float:
    """The fastest of so many rounds."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        run(loaded, requests, at_a_time)
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(family: str, size: int, rounds: int, report: Report) -> None:
    """Add one family's figures."""
    folder: Path = diffusers_tiny.build(family, WORK / "diffusers" / family)
    requests = messages(family, size)
    found: dict[str, dict[str, float]] = {}
    for cache, (backend, settings) in CACHES.items():
        context = LoadContext(
            str(folder), torch.device("cpu"), cache_backend=backend, cache_config=settings
        )
        loaded = load(context)
        with counted(loaded) as work:
            made = run(loaded, requests, 1)  # alone, so that nothing is padded
        figures: dict[str, float] = {"work": sum(work)}
        for name, at_a_time in (("alone_s", 1), ("together_s", REQUESTS)):
            if rounds:
                figures[name] = seconds(loaded, requests, at_a_time, rounds)
        found[cache] = figures
        if cache == "none":
            plain = made
            continue
        base = found["none"]
        figures["psnr_db"] = sum(map(psnr, made, plain)) / len(made)
        left_out = 100 * (1 - figures["work"] / base["work"])
        report.add(f"{family}, {cache}: block work left out", left_out, "%")
        report.add(f"{family}, {cache}: PSNR against none", figures["psnr_db"], "dB")
        for name, shown in (("alone_s", "one"), ("together_s", str(REQUESTS))):
            if rounds:
                speed = base[name] / figures[name]
                report.add(f"{family}, {cache}: speed, {shown} at a time", speed, "x")
    report.raw[family] = found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--rounds", type=int, default=3, help="runs, of which the fastest counts")
    parser.add_argument("--no-times", action="store_true", help="do not measure speeds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("diffusion_caches")
    for name in args.families:
        measure(name, args.size, 0 if args.no_times else args.rounds, report)
    report.finish()


if __name__ == "__main__":
    main()
