# SPDX-License-Identifier: Apache-2.0
"""The delay pattern equals a plain loop per request (A-60, A-65)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from tests.models.speech import greedy
from vllm_omni.models.delay import FREE, DelayPattern
from vllm_omni.models.groups import draw_groups
from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.speech.delay import delayed, undelayed

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

BEGIN, END = 8, 9
GROUPS = 3
DELAYS = st.lists(st.integers(0, 5), min_size=GROUPS, max_size=GROUPS).map(sorted).map(tuple)
ROWS = st.lists(
    st.lists(st.integers(0, END), min_size=GROUPS, max_size=GROUPS), min_size=1, max_size=14
)
quick = settings(max_examples=60, deadline=None)


def one_by_one(drawn: Sequence[Sequence[int]], delays: Sequence[int]) -> list[list[int]]:
    """The rows of one request, to its end: what the description says, one code at a time."""
    rows: list[list[int]] = []
    said: int | None = None
    for index, row in enumerate(drawn):
        made = []
        for code, delay in zip(row, delays, strict=True):
            if said is not None and index - said >= delay:
                made.append(END)
            else:
                made.append(BEGIN if index < delay else code)
        if said is None and END in made:
            said = index
        rows.append(made)
        if made == [END] * GROUPS:
            break
    return rows


@quick
@given(st.lists(ROWS, min_size=1, max_size=4), DELAYS)
def test_rows_equal_those_of_a_plain_loop(
    requests: list[list[list[int]]], delays: tuple[int, ...]
) -> None:
    """All at once, each from its own start, whatever company comes and goes."""
    pattern = DelayPattern(delays, BEGIN, END)
    memory = torch.zeros(len(requests), DelayPattern.MEMORY, dtype=torch.int64)
    made: list[list[list[int]]] = [[] for _ in requests]
    open_ = list(range(len(requests)))
    for index in range(max(map(len, requests))):
        open_ = [i for i in open_ if index < len(requests[i])]
        if not open_:
            break
        drawn = torch.tensor([requests[i][index] for i in open_])
        step = pattern.step(drawn, memory[open_])
        memory[open_] = step.memory
        for i, row in zip(open_, step.codes.tolist(), strict=True):
            made[i].append(row)
        open_ = [i for i, ended in zip(open_, step.ended.tolist(), strict=True) if not ended]
    assert made == [one_by_one(drawn, delays) for drawn in requests]


def test_a_stream_ends_with_a_row_of_nothing_but_ends() -> None:
    """The end is said in one group; the others follow at their turn, the last row is terminal."""
    pattern = DelayPattern((1, 2, 3), BEGIN, END)
    memory = torch.zeros(1, DelayPattern.MEMORY, dtype=torch.int64)
    assert pattern.forced(memory).tolist() == [[BEGIN] * 3]
    rows, ended = [], []
    for drawn in ([0, 0, 0], [1, 1, 1], [END, 2, 2], [3, 3, 3], [4, 4, 4], [5, 5, 5]):
        step = pattern.step(torch.tensor([drawn]), memory)
        memory = step.memory
        rows.append(step.codes[0].tolist())
        ended.append(bool(step.ended))
    assert rows == [
        [BEGIN, BEGIN, BEGIN],
        [1, BEGIN, BEGIN],
        [END, 2, BEGIN],
        [END, 3, 3],
        [END, END, 4],
        [END, END, END],
    ]
    assert ended == [False] * 5 + [True]


def v3(groups: int) -> DelayPattern:
    return DelayPattern(tuple(range(groups)), BEGIN, END, closing_row=False)


@quick
@given(st.lists(st.lists(st.integers(0, 7), min_size=4, max_size=4), min_size=1, max_size=9))
def test_a_stream_may_end_with_its_last_code(frames: list[list[int]]) -> None:
    """A-60: Higgs-Audio v3's rows are those of the whole stream but for the one of nothing but
    ends; the last one has a code in its last group, and whoever comes later is not held up."""
    groups = len(frames[0])
    rows = delayed(torch.tensor(frames), tuple(range(groups)), BEGIN, END)[:-1]
    pattern, memory = v3(groups), torch.zeros(2, DelayPattern.MEMORY, dtype=torch.int64)
    for index, row in enumerate(rows):
        # The model says the end, and of the others whatever it likes.
        wild = torch.where((row == BEGIN) | (row == END), 3, row)
        wild[0] = row[0]
        step = pattern.step(torch.stack([wild, torch.full((groups,), 5)]), memory)
        memory = step.memory
        assert torch.equal(step.codes[0], row)
        assert step.ended.tolist() == [index == len(rows) - 1, False]


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (2, 1), (3, 2), (8, 7)])
def test_the_ramp_down_has_a_row_for_each_further_group(groups: int, rows: int) -> None:
    """A-60: the first Q - rem groups are locked, and the terminal row is one of the stream."""
    pattern, memory = v3(groups), torch.zeros(1, DelayPattern.MEMORY, dtype=torch.int64)
    ended, locked = [], []
    for index in range(groups + rows):
        drawn = torch.full((1, groups), 5)
        drawn[0, 0] = END if index == groups else 5
        step = pattern.step(drawn, memory)
        memory = step.memory
        locked.append(int((step.codes == END).sum()))
        ended.append(bool(step.ended))
    assert locked == [0] * groups + list(range(1, rows + 1))
    assert ended == [False] * (groups + rows - 1) + [True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_codes_are_not_drawn(temperature: float) -> None:
    """A-60: where everything is masked, the choice is that of argmax, and no error."""
    logits = torch.randn(50, 4, END + 1, generator=torch.Generator().manual_seed(0))
    logits[..., BEGIN:] += 20
    logits[7, 2] = float("-inf")
    sampling = FrameSampling(
        temperature=torch.full((50,), temperature),
        top_k=torch.zeros(50, dtype=torch.int64),
        top_p=torch.ones(50),
        noise=Noise(torch.arange(50), torch.zeros(50, dtype=torch.int64)),
        all_greedy=temperature == 0,
        memory=torch.zeros(50, 0, dtype=torch.int64),
    )
    codes = draw_groups(v3(4).without_specials(logits), sampling)
    assert (codes[:, 0] == END).all(), "the first group may end"
    assert (codes[:, 1:] < BEGIN).all()
    assert codes[7, 2] == logits[7, 2].argmax()


def test_no_row_waits_for_the_device() -> None:
    """A-60: rows are made of numbers that nobody has looked at; looking would raise here."""
    with FakeTensorMode():
        pattern = v3(8)
        logits = pattern.without_specials(torch.randn(5, 8, END + 1))
        memory = torch.zeros(5, DelayPattern.MEMORY, dtype=torch.int64)
        step = pattern.step(draw_groups(logits, greedy(5)), memory)
        assert step.codes.shape == (5, 8) and step.ended.shape == (5,)


@quick
@given(st.lists(st.lists(st.integers(0, 7), min_size=GROUPS, max_size=GROUPS), max_size=9), DELAYS)
def test_round_trip(frames: list[list[int]], delays: tuple[int, ...]) -> None:
    codes = torch.tensor(frames, dtype=torch.int32).reshape(-1, GROUPS)
    rows = delayed(codes, delays, BEGIN, END)
    assert rows.dtype == codes.dtype
    assert rows.shape == (len(frames) + max(delays) + 1, GROUPS)
    assert torch.equal(undelayed(rows[:-1], delays), codes)
    # What the model would make of these codes is these rows.
    pattern = DelayPattern(tuple(d + 1 for d in delays), BEGIN, END)
    memory = torch.zeros(1, DelayPattern.MEMORY, dtype=torch.int64)
    for index in range(len(rows)):
        forced = pattern.forced(memory)[0]
        begun = index >= torch.tensor(delays) + 1
        assert torch.equal(forced == BEGIN, ~begun)
        memory = pattern.step(torch.full((1, GROUPS), 1), memory).memory
    assert FREE not in rows


@pytest.mark.parametrize("count", range(4))
def test_too_few_rows_are_no_frames(count: int) -> None:
    """A-65: what ended during the ramp-in is nothing, not an error."""
    rows = torch.full((count, GROUPS), BEGIN)
    assert undelayed(rows, (1, 2, 3)).shape == (0, GROUPS)
