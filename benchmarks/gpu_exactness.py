# SPDX-License-Identifier: Apache-2.0
"""Part of `diffusion_gpu.py`: is what the engine makes on a device what diffusers makes there?"""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Report
from gpu_models import tiny_folder

from tests.diffusion.parity import (
    MIXED,
    Ask,
    Made,
    Unmeasured,
    counted,
    load,
    served,
    stock,
    to_message,
)
from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.programs.diffusers import image as program
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import Loaded
from vllm_omni.outputs import STEP
from vllm_omni.testing import diffusers_tiny
from vllm_omni.testing.diffusers_tiny import Example

FAMILIES = ("flux", "sd3", "qwen_image", "z_image", "sdxl", "wan21_t2v")
BOUND = 1e-4
GUIDED = ("qwen_image", "wan21_t2v")
CANCELS = 20


def example_of(family: str) -> Example:
    return diffusers_tiny.recipe(family).examples[0]


def furthest(one: Made, other: Made) -> float:
    """The largest difference of two results."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class Loadings:
    """Tiny checkpoints on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, family: str, dtype: torch.dtype = torch.float32) -> Loaded:
        with torch.inference_mode():
            return load(tiny_folder(family), example_of(family).pipeline, dtype, self.device)


def mixed(family: str, loadings: Loadings, report: Report) -> None:
    """Eight mixed requests at once against diffusers, in float32; in bfloat16 for information."""
    example = example_of(family)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        if loadings.device.type == "cpu" and dtype is torch.bfloat16:
            break  # for minutes
        loaded = loadings(family, dtype)
        with torch.inference_mode():
            alone = [stock(loaded, example, ask) for ask in MIXED]
        together = served(loaded, example, MIXED, loadings.device)
        name = str(dtype).removeprefix("torch.")
        found[name] = [furthest(a, b) for a, b in zip(together, alone, strict=True)]
    worst = max(found["float32"])
    note = "; ".join(f"{name} {max(each):.2g}" for name, each in found.items())
    report.add(f"{family}: 8 mixed requests, largest difference", worst, "", BOUND, note)
    report.raw[f"exact {family}"] = found


def guidance(family: str, loadings: Loadings, report: Report) -> None:
    """One request alone whose second calls are foreseen."""
    loaded, example = loadings(family), example_of(family)
    ask = Ask("a fox jumps over a lazy dog", steps=8, guidance=4.0, seed=3)
    with counted(loaded) as plain, torch.inference_mode():
        expected = stock(loaded, example, ask)
    with counted(loaded) as forwards:
        (made,) = served(loaded, example, [ask], loadings.device)
    report.add(
        f"{family}: guidance foreseen, largest difference",
        furthest(made, expected),
        "",
        BOUND,
        f"{len(forwards)} forwards instead of {len(plain)}",
    )


class Requests:
    """An engine over one checkpoint, and requests to it."""

    def __init__(self, family: str, loadings: Loadings) -> None:
        self.loaded, self.example = loadings(family), example_of(family)
        self.device = loadings.device
        scheduler = CallScheduler(16, cost=Unmeasured())
        self.engine = Engine(program, self.loaded, device=self.device, scheduler=scheduler)

    def message(self, ask: Ask, **params: Any) -> Message:
        message = to_message(self.example, ask)
        given = {**message.options["params"], **params}
        return Message({**message.options, "params": given}, message.tensors, final=True)

    def expected(self, ask: Ask) -> Made:
        with torch.inference_mode():
            return stock(self.loaded, self.example, ask)


def previews(family: str, loadings: Loadings, report: Report) -> None:
    """A request that shows itself twice on the way makes the same in the end."""
    requests, ask = Requests(family, loadings), Ask("two blue rings", steps=6, seed=2)
    requests.engine.add("r", requests.message(ask, previews=2, progress=True))
    shown, last = 0, None
    while requests.engine.has_work:
        for emission in requests.engine.step():
            assert emission.error is None, emission.error
            if emission.tensors is not None:
                shown += STEP in emission.meta
                last = emission.tensors
    assert last is not None and shown == 2, shown
    difference = furthest(last, requests.expected(ask))
    report.add(f"{family}: with two previews, largest difference", difference, "", BOUND)


def aborts(family: str, loadings: Loadings, report: Report) -> None:
    """Half of eight requests are cancelled in the middle; then memory after so many cancels."""
    requests = Requests(family, loadings)
    asks = [Ask(f"a fox, picture {i}", steps=6 + i % 3, seed=i) for i in range(8)]
    expected = [requests.expected(ask) for ask in asks[::2]]
    started = _begin(requests, asks, forwards=4)
    requests.engine.abort(started[1::2])
    made = {}
    while requests.engine.has_work:
        for emission in requests.engine.step():
            assert emission.error is None, emission.error
            made[emission.request_id] = emission.tensors
    assert sorted(made) == started[::2], sorted(made)
    worst = max(furthest(made[n], e) for n, e in zip(started[::2], expected, strict=True))
    report.add(f"{family}: others after aborts in the middle", worst, "", BOUND)

    requests.engine.abort(_begin(requests, asks, forwards=4))
    before = allocated(loadings.device)
    for number in range(CANCELS):
        ids = _begin(requests, asks[:4], forwards=1 + number % 7)
        requests.engine.abort(ids)
        assert not requests.engine.has_work and not len(requests.engine)
    left = allocated(loadings.device) - before
    report.add(f"{family}: memory left by {4 * CANCELS} cancelled requests", left, "bytes", 0)


def _begin(requests: Requests, asks: list[Ask], forwards: int) -> list[str]:
    for number, ask in enumerate(asks):
        requests.engine.add(str(number), requests.message(ask))
    for _ in range(forwards):
        requests.engine.step()
    return [str(number) for number in range(len(asks))]


def allocated(device: torch.device) -> int:
    """Bytes of the device's memory that tensors hold."""
    gc.collect()
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def offline(folder: Path, dtype: str, report: Report) -> None:
    """The whole server, offline: a picture by way of a process of its own."""
    from vllm_omni import Omni, OmniDiffusionSamplingParams

    params = OmniDiffusionSamplingParams(height=64, width=64, num_inference_steps=4, seed=1)
    with Omni(model=str(folder), dtype=dtype) as omni:
        outputs = omni.generate(["a red cat", "a blue dog"], params, use_tqdm=False)
    sizes = [output.images[0].size for output in outputs]
    assert sizes == [(64, 64)] * 2, sizes
    report.add("pictures by `Omni(model=...)`", len(sizes), "", 2)


def measure(device: torch.device, families: Sequence[str], report: Report) -> None:
    """Add all figures of some families."""
    loadings = Loadings(device)
    for family in families:
        mixed(family, loadings, report)
        if family in GUIDED:
            guidance(family, loadings, report)
    for family in families[::2]:
        previews(family, loadings, report)
        aborts(family, loadings, report)
