# SPDX-License-Identifier: Apache-2.0
"""Repetition-aware sampling equals a plain loop, and breaks a loop (B-M58)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.models.repetition import Repetition

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

ROWS, GROUPS, CODES = 4, 3, 6
IGNORED = (5,)
CODE_ROWS = st.lists(
    st.lists(st.integers(0, CODES - 1), min_size=GROUPS, max_size=GROUPS), min_size=1, max_size=9
)


def sampling(*temperatures: float) -> FrameSampling:
    count = len(temperatures)
    return FrameSampling(
        temperature=torch.tensor(temperatures),
        top_k=torch.ones(count, dtype=torch.int64),
        top_p=torch.ones(count),
        noise=Noise(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        all_greedy=False,
        memory=torch.zeros(count, 0, dtype=torch.int64),
    )


@settings(max_examples=50, deadline=None)
@given(CODE_ROWS, st.integers(1, 3))
def test_what_is_too_often(rows: list[list[int]], most: int) -> None:
    """Logits allow the ignored code alone, so what is drawn anew shows; greedy is greedy."""
    repetition = Repetition(ROWS, most, IGNORED)
    memory = torch.zeros(2, repetition.memory(GROUPS), dtype=torch.int64)
    logits = torch.full((2, GROUPS, CODES), -1e9)
    logits[..., IGNORED[0]] = 0
    for index, row in enumerate(rows):
        drawn = torch.tensor([row, row])
        made = repetition.redrawn(drawn, logits, memory, sampling(0.5, 0.0)).tolist()
        before = rows[max(0, index - ROWS) : index]
        expected = [
            IGNORED[0] if sum(old[k] == code for old in before) >= most else code
            for k, code in enumerate(row)
        ]
        assert made == [expected, row]
        memory = repetition.noted(drawn, memory)


def test_what_is_drawn_anew_depends_on_the_own_seed_only() -> None:
    repetition = Repetition(ROWS, 1, ())
    logits = torch.randn(2, GROUPS, CODES, generator=torch.Generator().manual_seed(0))
    codes = torch.zeros(2, GROUPS, dtype=torch.int64)
    none = torch.zeros(2, repetition.memory(GROUPS), dtype=torch.int64)
    memory = repetition.noted(codes, none)
    both = repetition.redrawn(codes, logits, memory, sampling(1.0, 1.0))
    alone = repetition.redrawn(codes[:1], logits[:1], memory[:1], sampling(1.0))
    assert torch.equal(both[:1], alone)
    assert both.any()
