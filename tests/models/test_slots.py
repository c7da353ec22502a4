# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS's pattern of text tokens and codes equals a plain loop per request (B-M56)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from vllm_omni.models.slots import SlotPattern, SlotTokens

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

GROUPS, WORDS, PAD = 3, 9, 8
TOKENS = SlotTokens(start=3, stop=4, generate=5, delay=6, end=7, pad=8)
DRAWN = st.lists(st.permutations(range(WORDS)), min_size=1, max_size=16)


def one_by_one(drawn: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of one request, to its end: of each step's words the first one that may come is taken.

    The names are those of the reference's `generate`.
    """
    rows: list[list[int]] = []
    audio_length, delayed_length, is_audio = 0, None, False
    for step, words in enumerate(drawn):
        if delayed_length is not None and delayed_length < GROUPS:
            text = TOKENS.delay
        elif delayed_length == GROUPS:
            text, is_audio = TOKENS.stop, False
        else:
            slots = {TOKENS.generate, TOKENS.delay}
            allowed = slots if is_audio else {*range(WORDS)} - slots - {TOKENS.pad, TOKENS.stop}
            if step == 0:
                allowed = allowed - {TOKENS.delay}
            if step <= GROUPS:
                allowed = allowed - {TOKENS.end}
            text = next(word for word in words if word in allowed)
        is_audio = is_audio or text == TOKENS.start
        codes = [
            1 if audio_length > k and (delayed_length is None or k >= delayed_length) else PAD
            for k in range(GROUPS)
        ]
        rows.append([text, *codes])
        if text in (TOKENS.stop, TOKENS.end):
            break
        if text in (TOKENS.start, TOKENS.generate, TOKENS.delay):
            audio_length += 1
        if delayed_length is None and text == TOKENS.delay:
            delayed_length = 0
        if delayed_length is not None:
            delayed_length += 1
    return rows


@settings(max_examples=100, deadline=None)
@given(st.lists(DRAWN, min_size=1, max_size=4))
def test_rows_equal_those_of_a_plain_loop(requests: list[list[list[int]]]) -> None:
    """All at once, each from its own start, whatever company comes and goes."""
    pattern = SlotPattern(GROUPS, WORDS, TOKENS, PAD)
    memory = torch.zeros(len(requests), SlotPattern.MEMORY, dtype=torch.int64)
    made: list[list[list[int]]] = [[] for _ in requests]
    open_ = list(range(len(requests)))
    for index in range(max(map(len, requests))):
        open_ = [i for i in open_ if index < len(requests[i])]
        if not open_:
            break
        wanted = torch.tensor([requests[i][index] for i in open_])
        likes = torch.empty(len(open_), WORDS).scatter_(
            1, wanted, torch.arange(WORDS, 0, -1.0).expand(len(open_), -1)
        )
        text = likes.masked_fill(~pattern.allowed(memory[open_]), -1).argmax(dim=1)
        step = pattern.step(text, torch.ones(len(open_), GROUPS, dtype=torch.int64), memory[open_])
        memory[open_] = step.memory
        rows = torch.cat([step.text[:, None], step.codes], dim=1)
        for i, row in zip(open_, rows.tolist(), strict=True):
            made[i].append(row)
        open_ = [i for i, ended in zip(open_, step.ended.tolist(), strict=True) if not ended]
    assert made == [one_by_one(drawn) for drawn in requests]


def test_no_row_waits_for_the_device() -> None:
    """Rows are made of numbers that nobody has looked at; looking would raise here."""
    with FakeTensorMode():
        pattern = SlotPattern(GROUPS, WORDS, TOKENS, PAD)
        memory = torch.zeros(5, SlotPattern.MEMORY, dtype=torch.int64)
        text = pattern.allowed(memory).long().argmax(dim=1)
        step = pattern.step(text, torch.zeros(5, GROUPS, dtype=torch.int64), memory)
        assert step.codes.shape == (5, GROUPS) and step.ended.shape == (5,)
