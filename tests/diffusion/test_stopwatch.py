# SPDX-License-Identifier: Apache-2.0
"""Forwards are timed, on any device, without waiting for it."""

import contextlib
import time

import pytest
import torch

from tests.diffusion.test_scheduler import make_call
from vllm_omni.diffusion.calls import Batch
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.stopwatch import stopwatch_for

pytestmark = [pytest.mark.core_model, pytest.mark.diffusion]

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.cpu),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


@pytest.mark.parametrize("device", DEVICES)
def test_forwards_are_timed_unless_they_fail(device: str) -> None:
    stopwatch = stopwatch_for(torch.device(device))
    x = torch.ones(512, 512, device=device)
    batches = [Batch.of([make_call(Job())]) for _ in range(3)]
    with contextlib.suppress(ArithmeticError), stopwatch.timing(batches[0]):
        raise ArithmeticError
    for batch in batches[1:]:
        with stopwatch.timing(batch):
            x = x @ x / 512
    timed: list[tuple[Batch, float]] = []
    while len(timed) < 2:
        timed += stopwatch.results()
        time.sleep(0.001)
    assert [batch for batch, _ in timed] == batches[1:]
    assert all(seconds > 0 for _, seconds in timed)
    assert not list(stopwatch.results())
