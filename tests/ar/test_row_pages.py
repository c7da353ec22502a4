# SPDX-License-Identifier: Apache-2.0
"""Pages of input parts behave like one growing list of vectors per request."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.ar.row_pages import PAGE, USUAL_POSITIONS, RowPages

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

PAD = torch.tensor([-1.0, -2.0])
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "write", "complete"]),
        st.integers(0, 3),
        st.integers(1, 3 * PAGE),
    ),
    max_size=30,
)


class Model:
    """A request as a plain list of vectors."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self.complete: int | None = None


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_as_plain_lists(actions: list[tuple[str, int, int]]) -> None:
    pages, live, number = RowPages(1, PAD), dict[int, Model](), 0.0
    for action, slot, count in actions:
        if action == "open" and slot not in live:
            pages.open(slot)
            live[slot] = Model()
        elif slot not in live:
            continue
        elif action == "close":
            pages.close(slot)
            del live[slot]
        elif action == "complete" and live[slot].complete is None:
            live[slot].complete = len(live[slot].rows)
            pages.complete(slot, len(live[slot].rows))
        elif action == "write" and live[slot].complete is None:
            start = len(live[slot].rows)
            number += 1
            pages.reserve(np.array([slot]), np.array([start + count]))
            where = pages.index(np.full(count, slot), np.arange(start, start + count))
            pages.row_part[torch.from_numpy(where)] = number
            live[slot].rows += [[number, number]] * count
        _check(pages, live, count)


def _check(pages: RowPages, live: dict[int, Model], more: int) -> None:
    slots = np.array(sorted(live), dtype=np.int64)
    stops = np.array([len(live[slot].rows) + more for slot in slots], dtype=np.int64)
    pages.reserve(slots, stops)
    if not len(slots):
        return
    where = pages.index(np.repeat(slots, stops), np.concatenate([np.arange(s) for s in stops]))
    assert len(set(where.tolist())) == len(where)
    read = torch.from_numpy(where)
    expected = []
    for slot in slots.tolist():
        rest = [0.0, 0.0] if live[slot].complete is None else PAD.tolist()
        expected += live[slot].rows + [rest] * more
    assert pages.row_part[read].tolist() == expected
    assert not pages.frame_part[read].any()


def test_there_are_more_pages_when_they_are_needed() -> None:
    pages = RowPages(1, PAD)
    pages.open(0)
    pages.reserve(np.array([0]), np.array([USUAL_POSITIONS]))
    pages.row_part[:] = 5
    pages.reserve(np.array([0]), np.array([USUAL_POSITIONS + 1]))
    where = pages.index(np.zeros(USUAL_POSITIONS + 1, int), np.arange(USUAL_POSITIONS + 1))
    assert (pages.row_part[torch.from_numpy(where[:-1])] == 5).all()
    assert not pages.row_part[where[-1]].any()
