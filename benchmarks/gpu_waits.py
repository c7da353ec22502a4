# SPDX-License-Identifier: Apache-2.0
"""Part of `diffusion_gpu.py`: where does the host wait for the device while requests run?"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import Report
from gpu_exactness import Loadings, Requests

from tests.diffusion.parity import Ask

STEPS, REQUESTS, SIDE = 8, 4, 256
"""A side of so many pixels: latents as small as those of tiny pictures are compared by value."""
OURS = "vllm_omni"


@contextmanager
def noted(device: torch.device) -> Iterator[Counter[str]]:
    """Counts the places from which torch waits."""
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """The innermost frame outside of torch, and the innermost of this project."""
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    frames = [f for f in frames if not f.filename.endswith("warnings.py")]
    inner = next((f for f in reversed(frames) if "/torch/" not in f.filename), frames[-1])
    ours = next((f for f in reversed(frames) if f"/{OURS}/" in f.filename), inner)
    return " < ".join(dict.fromkeys(map(_shown, (inner, ours))))


def _shown(frame: traceback.FrameSummary) -> str:
    folder, _, name = frame.filename.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}:{frame.lineno} {frame.name}"


def measure(device: torch.device, families: Sequence[str], report: Report) -> None:
    """Add each family's waits: those at every step, and those of a request as a whole."""
    loadings = Loadings(device)
    for family in families:
        requests = Requests(family, loadings)
        for together in (1, REQUESTS):
            sides = {"height": SIDE, "width": SIDE}
            asks = [Ask(f"a fox, {i}", steps=STEPS, seed=i, **sides) for i in range(together)]
            with noted(device) as places:
                for i, ask in enumerate(asks):
                    requests.engine.add(str(i), requests.message(ask))
                while requests.engine.has_work:
                    for emission in requests.engine.step():
                        assert emission.error is None, emission.error
            often = sum(n for n in places.values() if n >= together * (STEPS - 3))
            name = f"{family}, {together} at once: waits per request and step"
            once = sum(places.values()) - often
            note = f"and {once / together:.1f} per request"
            report.add(name, often / together / STEPS, "", note=note)
            report.raw[name] = dict(places.most_common(20))
