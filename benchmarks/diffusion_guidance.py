# SPDX-License-Identifier: Apache-2.0
"""One guided request alone: two forwards per step, or one of two rows.

    python benchmarks/diffusion_guidance.py [FAMILY ...]

For pipelines that call their transformer twice per step, the steps per second of one request, with
second calls foreseen (`vllm_omni.diffusion.foresight`) and not. Runs alternate; a figure is the
median of each, encoding and decoding included.
"""

import argparse
import statistics
import time

import torch
from common import WORK, Report

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs import diffusers as programs
from vllm_omni.diffusion.programs.diffusers.load import load
from vllm_omni.diffusion.spec import LoadContext, Loaded
from vllm_omni.generation import PARAMETERS
from vllm_omni.testing import diffusers_tiny

GUIDANCE = {"qwen_image": "true_cfg_scale", "wan21_t2v": "guidance_scale"}
"""Families, and what they call the scale."""
STEPS = 30


def request(family: str, size: int) -> Message:
    """Of a picture or video with a negative prompt."""
    given = {
        **diffusers_tiny.recipe(family).examples[0].fixed,
        "height": size,
        "width": size,
        "num_inference_steps": STEPS,
        GUIDANCE[family]: 4.0,
    }
    own = {name: given.pop(name) for name in PARAMETERS if name in given}
    options = {
        "prompt": "a red cat on a green hill",
        "negative_prompt": "a blurred dog",
        "params": {**own, "seed": 1, "extra_args": given},
    }
    return Message({**options, "seed": 1}, final=True)


def run(loaded: Loaded, message: Message, foresee: bool) -> tuple[float, dict[int, int]]:
    """Steps per second, and how many forwards were of how many calls."""
    engine = Engine(programs.image, loaded, foresee=foresee)
    began = time.perf_counter()
    engine.add("r", message)
    while engine.has_work:
        for emission in engine.step():
            assert emission.error is None, emission.error
    return STEPS / (time.perf_counter() - began), engine.forward_sizes


def measure(family: str, size: int, rounds: int, report: Report) -> None:
    """Add one family's figures."""
    folder = diffusers_tiny.build(family, WORK / "diffusers" / family)
    loaded = load(LoadContext(str(folder), torch.device("cpu")))
    message = request(family, size)
    speeds: dict[bool, list[float]] = {False: [], True: []}
    sizes: dict[bool, dict[int, int]] = {}
    for number in range(rounds + 1):
        for foresee in speeds:
            speed, sizes[foresee] = run(loaded, message, foresee)
            if number:  # the first round warms up
                speeds[foresee].append(speed)
    apart, together = (statistics.median(speeds[each]) for each in (False, True))
    note = f"{together:.0f} steps/s against {apart:.0f}; forwards by calls {sizes[True]}"
    report.add(
        f"{family}, {size} px: steps per second over two calls", together / apart, "x", note=note
    )
    report.raw[f"{family} {size}"] = {
        "steps_per_s": {"foreseen": speeds[True], "not": speeds[False]},
        "forward_sizes": {"foreseen": sizes[True], "not": sizes[False]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=GUIDANCE)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128], help="pixels of a side")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("diffusion_guidance")
    for family in args.families:
        for size in args.sizes:
            measure(family, size, args.rounds, report)
    report.finish()


if __name__ == "__main__":
    main()
