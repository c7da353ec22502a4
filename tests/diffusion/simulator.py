# SPDX-License-Identifier: Apache-2.0
"""A device in virtual time under the real scheduler: recorded costs, random arrivals.

The costs were recorded on an NVIDIA H200 (torch 2.11, bfloat16, median of four after one warm-up):
T5-XXL's encoder on 512 tokens, a diffusion transformer of 1.2 B parameters (24 blocks of width
2048, 512 text tokens and one token per 16x16 pixels), and a decoder shaped like AutoencoderKL's.
"""

import inspect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_omni.diffusion.calls import Batch, Call
from vllm_omni.diffusion.collate import Collator
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.policy import Policy
from vllm_omni.diffusion.rules import CallRules
from vllm_omni.diffusion.scheduler import CallScheduler

BATCHES = (1, 2, 4, 8, 16, 32)
COSTS: dict[tuple[str, int], tuple[float, ...]] = {
    ("encode", 0): (0.05046, 0.05291, 0.091882, 0.17752, 0.352239, 0.698646),
    ("denoise", 256): (0.023556, 0.021233, 0.022127, 0.032003, 0.064512, 0.129616),
    ("denoise", 512): (0.02026, 0.019976, 0.033835, 0.066605, 0.133963, 0.262345),
    ("denoise", 1024): (0.028771, 0.059193, 0.118393, 0.238186, 0.476497, 0.959683),
    ("decode", 256): (0.005851, 0.007112, 0.01056, 0.016193, 0.029273, 0.057825),
    ("decode", 512): (0.016766, 0.024204, 0.0368, 0.062118, 0.113533, 0.226742),
    ("decode", 1024): (0.066686, 0.091967, 0.142596, 0.24612, 0.459268),
}
"""Seconds of a forward by (method, pixels a side), for each size of `BATCHES`."""
SIZES = {256: 0.6, 512: 0.3, 1024: 0.1}
"""Share of the requests by pixels a side."""
STEPS = (4, 8, 20, 28, 50)


def seconds(method: str, size: int, calls: int) -> float:
    """A forward's time: linear between the recorded ones, and beyond them."""
    costs = COSTS[method, size]
    upper = min(next((i for i, n in enumerate(BATCHES) if n >= calls), 99), len(costs) - 1)
    lower = max(0, upper - 1)
    upper = lower + 1
    share = (calls - BATCHES[lower]) / (BATCHES[upper] - BATCHES[lower])
    return costs[lower] + share * (costs[upper] - costs[lower])


def _collator(name: str) -> Collator:
    def run() -> None: ...

    run.__name__ = name
    return Collator(run, inspect.signature(run), CallRules(), torch.device("cpu"))


METHODS = {name: _collator(name) for name in ("encode", "denoise", "decode")}


@dataclass(slots=True, eq=False)
class Request:
    """An image to be made.

    Attributes:
        came_s: When it comes.
        size: Pixels a side.
        steps: Denoising steps.
        priority: As vLLM's.
        done_s: When it was made; None before.
    """

    came_s: float
    size: int
    steps: int
    priority: int = 0
    done_s: float | None = None

    @property
    def latency_s(self) -> float:
        assert self.done_s is not None
        return self.done_s - self.came_s

    @property
    def alone_s(self) -> float:
        """How long it takes with nobody else there."""
        parts = (1, "encode", 0), (self.steps, "denoise", self.size), (1, "decode", self.size)
        return sum(times * seconds(method, size, 1) for times, method, size in parts)

    def calls(self, job: Job) -> "list[Call]":
        """Its calls, last one first."""
        job.expect(METHODS["denoise"], self.steps)
        encode = _call(job, "encode", 0, 512)
        denoise = [
            _call(job, "denoise", self.size, 512 + (self.size // 16) ** 2)
            for _ in range(self.steps)
        ]
        decode = _call(job, "decode", self.size, 16 * (self.size // 8) ** 2)
        return [decode, *denoise, encode]


def _call(job: Job, method: str, size: int, work: int) -> Call:
    call = Call(None, METHODS[method], (), {}, job)  # type: ignore[arg-type]
    call.signature, call.work = size, work
    return call


class Scheduler(Protocol):
    """What the simulator needs of `CallScheduler`."""

    def begin_job(self, priority: int) -> Job: ...
    def end_job(self, job: Job) -> None: ...
    def add(self, call: Call) -> None: ...
    def select(self) -> list[Call]: ...
    def ran(self, batch: Batch, seconds: float) -> None: ...


class Baseline:
    """Batches whatever can run with the call that is first by a key, up to `max_batch`."""

    def __init__(self, max_batch: int, clock: Callable[[], float], key: Callable[[Call], float]):
        self._max_batch, self._clock, self._key = max_batch, clock, key
        self.calls: list[Call] = []
        self._added = 0

    def begin_job(self, priority: int) -> Job:
        return Job(priority, self._clock())

    def end_job(self, job: Job) -> None: ...

    def ran(self, batch: Batch, seconds: float) -> None: ...

    def add(self, call: Call) -> None:
        call.serial = self._added = self._added + 1
        self.calls.append(call)

    def select(self) -> list[Call]:
        if not self.calls:
            return []
        self.calls.sort(key=self._key)
        group = self.calls[0].group
        chosen = [call for call in self.calls if call.group == group][: self._max_batch]
        self.calls = [call for call in self.calls if call not in chosen]
        return chosen


class LargestFirst(Baseline):
    """Batches the largest group."""

    def select(self) -> list[Call]:
        groups: dict[object, int] = {}
        for call in self.calls:
            groups[call.group] = groups.get(call.group, 0) + 1
        self._key = lambda call: (-min(self._max_batch, groups[call.group]), call.serial)
        return super().select()


class Clock:
    """Virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


MAX_BATCH = 32
SCHEDULERS: dict[str, Callable[[Clock], Scheduler]] = {
    "first come, first served": lambda clock: Baseline(MAX_BATCH, clock, lambda c: c.job.since_s),
    "round robin": lambda clock: Baseline(MAX_BATCH, clock, lambda c: c.serial),
    "largest batch first": lambda clock: LargestFirst(MAX_BATCH, clock, lambda c: 0),
    "shortest remaining first": lambda clock: CallScheduler(MAX_BATCH, Policy(), clock=clock),
}


def poisson(rate: float, count: int, seed: int) -> list[Request]:
    """Requests of mixed sizes and steps, `rate` per second on average."""
    chance = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        (size,) = chance.choices(list(SIZES), list(SIZES.values()))
        requests.append(Request(now, size, chance.choice(STEPS)))
    return requests


def simulate(
    make: Callable[[Clock], Scheduler], requests: Sequence[Request], seed: int = 0
) -> None:
    """Run requests, in order of arrival, to their ends; forwards take up to 5 % more or less."""
    clock, chance = Clock(), random.Random(seed)
    scheduler = make(clock)
    coming = list(reversed(requests))
    left: dict[Job, tuple[Request, list[Call]]] = {}

    def park_next(job: Job) -> None:
        request, calls = left[job]
        if calls:
            scheduler.add(calls.pop())
            return
        del left[job]
        scheduler.end_job(job)
        request.done_s = clock.now

    while coming or left:
        if not left:
            clock.now = max(clock.now, coming[-1].came_s)
        while coming and coming[-1].came_s <= clock.now:
            request = coming.pop()
            job = scheduler.begin_job(request.priority)
            left[job] = request, request.calls(job)
            park_next(job)
        batch = scheduler.select()
        method = batch[0].collator.function.__name__
        took = seconds(method, batch[0].signature, len(batch)) * chance.uniform(0.95, 1.05)
        clock.now += took
        scheduler.ran(Batch.of(batch), took)
        for call in batch:
            park_next(call.job)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent do not exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]
