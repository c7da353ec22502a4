# SPDX-License-Identifier: Apache-2.0
"""Requests to a call-batching engine that come as others end."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from vllm_omni.diffusion.engine import Engine
from vllm_omni.diffusion.program import Message
from vllm_omni.outputs import STEP

JobT = TypeVar("JobT")


def steps_per_second(
    engine: Engine,
    work: Sequence[JobT],
    message: Callable[[JobT], Message],
    concurrency: int,
    finish: Callable[[], None] = lambda: None,
) -> float:
    """Steps per second of so many requests at a time.

    Measured from when so many have ended until the last one starts: requests end and start all the
    time, and at no time are there fewer.

    Args:
        engine: Without requests, as it is afterwards.
        work: The requests, more than are counted.
        message: A request as the engine takes it.
        concurrency: How many at a time.
        finish: Waits until the device has done what it was given.
    """
    later: Iterator[tuple[int, JobT]] = iter(enumerate(work))
    for number, job in (next(later) for _ in range(concurrency)):
        engine.add(str(number), message(job))
    steps = ended = 0
    began = time.perf_counter()
    while True:
        for emission in engine.step():
            assert emission.error is None, emission.error
            steps += STEP in emission.meta
            if not emission.finished:
                continue
            ended += 1
            if ended == concurrency:
                steps, began = 0, time.perf_counter()
            if (following := next(later, None)) is None:
                finish()
                seconds = time.perf_counter() - began
                engine.abort([str(i) for i in range(len(work))])
                return steps / seconds
            engine.add(str(following[0]), message(following[1]))
