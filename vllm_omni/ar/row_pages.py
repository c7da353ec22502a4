# SPDX-License-Identifier: Apache-2.0
"""Where the two input parts of each position are: pages of a pool on the device.

A request's positions are pages that it gets as it grows, so requests may be as long as the model
allows without all of them taking as much memory as the longest. The host knows which page is where;
it says so to the device by indices.
"""

import numpy as np
import torch

from vllm_omni.platforms import to_device

PAGE = 64
"""Positions of a page."""
USUAL_POSITIONS = 512
"""Of a request, for which there is room from the start. There is more room, twice as much each
time, when it is needed; only what is there from the start is known to vLLM, which gives the rest of
a device's memory to its KV cache but for what `gpu_memory_utilization` leaves."""


class RowPages:
    """Row parts and frame parts of all requests.

    Args:
        requests: For how many there is usually room.
        pad: [width]; the row part of positions past a request's rows, once those are complete.

    Attributes:
        row_part: [pages * PAGE, width].
        frame_part: [pages * PAGE, width].
    """

    def __init__(self, requests: int, pad: torch.Tensor) -> None:
        self._pad = pad
        pages = requests * USUAL_POSITIONS // PAGE
        self.row_part = pad.new_empty(pages * PAGE, pad.shape[0])
        self.frame_part = torch.empty_like(self.row_part)
        self._free = list(range(pages))[::-1]
        self._tables: dict[int, list[int]] = {}
        self._complete: set[int] = set()

    def open(self, slot: int) -> None:
        """Begin a request, without positions."""
        self._tables[slot] = []

    def close(self, slot: int) -> None:
        """End a request."""
        self._free += self._tables.pop(slot)
        self._complete.discard(slot)

    def reserve(self, slots: np.ndarray, stops: np.ndarray) -> None:
        """Have room for the positions before `stops` of each request; new ones are zeros, or the
        pad row and zeros."""
        new: list[int] = []
        padded: list[int] = []
        for slot, stop in zip(slots.tolist(), stops.tolist(), strict=True):
            table = self._tables[slot]
            while len(table) * PAGE < stop:
                page = self._take()
                table.append(page)
                new.append(page)
                if slot in self._complete:
                    padded.append(page)
        if new:
            pages = to_device(torch.tensor(new), self._pad.device)
            self._paged(self.frame_part)[pages] = 0
            self._paged(self.row_part)[pages] = 0
        if padded:
            pages = to_device(torch.tensor(padded), self._pad.device)
            self._paged(self.row_part)[pages] = self._pad

    def complete(self, slot: int, filled: int) -> None:
        """A request gets no more rows than the `filled` ones: what comes after them is padded."""
        self._complete.add(slot)
        stop = len(self._tables[slot]) * PAGE
        if filled < stop:
            slots, positions = np.full(stop - filled, slot), np.arange(filled, stop)
            where = torch.from_numpy(self.index(slots, positions))
            self.row_part[to_device(where, self._pad.device)] = self._pad

    def index(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where positions are in `row_part` and `frame_part`, int64 [n] each."""
        used = np.unique(slots).tolist()
        starts, flat = {}, []
        for slot in used:
            starts[slot] = len(flat)
            flat += self._tables[slot]
        first = np.array([starts[slot] for slot in used], dtype=np.int64)
        first_page = first[np.searchsorted(used, slots)]
        return np.array(flat)[first_page + positions // PAGE] * PAGE + positions % PAGE

    def _take(self) -> int:
        """A free page, after twice as many have been made if there is none."""
        if not self._free:
            count = len(self.row_part) // PAGE
            self.row_part = torch.cat([self.row_part, torch.empty_like(self.row_part)])
            self.frame_part = torch.cat([self.frame_part, torch.empty_like(self.frame_part)])
            self._free = list(range(count, 2 * count))[::-1]
        return self._free.pop()

    def _paged(self, part: torch.Tensor) -> torch.Tensor:
        return part.view(-1, PAGE, part.shape[1])
