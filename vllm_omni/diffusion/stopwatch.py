# SPDX-License-Identifier: Apache-2.0
"""Timing forwards without waiting for the device."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from vllm_omni.diffusion.calls import Batch


class Stopwatch(ABC):
    """Times forwards; the times may come later."""

    @abstractmethod
    def timing(self, batch: Batch) -> AbstractContextManager[None]:
        """While the forward of this batch runs; one that raises is not timed."""

    @abstractmethod
    def results(self) -> Iterator[tuple[Batch, float]]:
        """The forwards that have ended since the last call, with their seconds."""


class HostStopwatch(Stopwatch):
    """For devices that have computed when a forward returns."""

    def __init__(self) -> None:
        self._done: list[tuple[Batch, float]] = []

    @contextmanager
    def timing(self, batch: Batch) -> Iterator[None]:
        """See `Stopwatch`."""
        began = time.perf_counter()
        yield
        self._done.append((batch, time.perf_counter() - began))

    def results(self) -> Iterator[tuple[Batch, float]]:
        """See `Stopwatch`."""
        done, self._done = self._done, []
        return iter(done)


class DeviceStopwatch(Stopwatch):
    """For accelerators, which run behind the host: events in the stream, read when they are over.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = torch.get_device_module(device)
        self._device = device
        self._pending: deque[tuple[Batch, torch.Event, torch.Event]] = deque()

    @contextmanager
    def timing(self, batch: Batch) -> Iterator[None]:
        """See `Stopwatch`."""
        began = self._mark()
        yield
        self._pending.append((batch, began, self._mark()))

    def results(self) -> Iterator[tuple[Batch, float]]:
        """See `Stopwatch`."""
        while self._pending and self._pending[0][2].query():
            batch, began, ended = self._pending.popleft()
            yield batch, began.elapsed_time(ended) / 1e3

    def _mark(self) -> torch.Event:
        event = self._accelerator.Event(enable_timing=True)
        event.record(self._accelerator.current_stream(self._device))
        return event


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return HostStopwatch() if device.type == "cpu" else DeviceStopwatch(device)
