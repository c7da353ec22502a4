# SPDX-License-Identifier: Apache-2.0
"""Where a text that is spoken in pieces is cut."""

import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_omni.speech.splitting import Granularity, TextSplitter

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

GRANULARITIES = st.sampled_from(["none", "sentence", "clause"])
MARKS = 'ab .!?。」\n,，—"1；…।؟'


def split(text: str, granularity: Granularity = "sentence", max_chars: int = 400) -> list[str]:
    splitter = TextSplitter(granularity, max_chars)
    return splitter.feed(text) + splitter.flush()


@pytest.mark.parametrize(
    "pieces",
    [
        ["Hello world.", " How are you?", " Fine!"],
        ["It costs 3.14 dollars, or 1,000.50 in all.", " So what?"],
        ["Mr. Smith met Dr. J. R. Jones, e.g. in St. Ives.", " They left."],
        ['She said "Go away!"', " Then (it seems.)", " nothing."],
        ["Wait...", " What?!", " Oh."],
        ["1. Bread.", " 2. Milk."],
        ["See https://example.com/a.b?c=d for more.", " Bye."],
        ["你好。", "今天天气很好！", "「是的。」", "他说？！", "走吧"],
        ["नमस्ते।", " आप कैसे हैं।"],
        ["كيف حالك؟", " بخير."],
        ["A heading\n\n", "A paragraph"],
    ],
)
def test_sentences(pieces: list[str]) -> None:
    assert split("".join(pieces)) == pieces


@pytest.mark.parametrize(
    "pieces",
    [
        ["When I came home,", " nobody was there;", " I ate 1,000 eggs."],
        ["我们今天去公园玩吧，好不好呢？", "我在那里等你，你要快点来，", "不要忘了"],
        ["Oh, well, that is so,", " then."],
    ],
)
def test_clauses_are_worth_a_generation_each(pieces: list[str]) -> None:
    assert split("".join(pieces), "clause") == pieces


@settings(max_examples=300, deadline=None)
@example(["।?.", " "], "sentence", 5)
@given(
    st.lists(st.text(alphabet=MARKS, max_size=12), max_size=8), GRANULARITIES, st.integers(5, 60)
)
def test_the_pieces_are_the_text_however_it_came(
    parts: list[str], granularity: Granularity, max_chars: int
) -> None:
    splitter = TextSplitter(granularity, max_chars)
    pieces = [piece for part in parts for piece in splitter.feed(part)] + splitter.flush()
    assert "".join(pieces) == "".join(parts)
    assert pieces == split("".join(parts), granularity, max_chars)
    assert all(0 < len(piece) <= max_chars for piece in pieces)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200), GRANULARITIES)
def test_any_text_is_kept(text: str, granularity: Granularity) -> None:
    assert "".join(split(text, granularity, 50)) == text


def test_a_long_word_is_cut() -> None:
    assert [len(piece) for piece in split("x" * 1000, "none", 300)] == [300, 300, 300, 100]
    assert split("aaaa bbbb cccc", "none", 10) == ["aaaa bbbb", " cccc"]


@pytest.mark.parametrize(
    "text",
    ["A. " * 21845, "\n" * 65536, " \n" * 32768, "(1.) " * 13000, "a" + "." * 65000, "a, " * 21845],
)
@pytest.mark.parametrize("granularity", ["sentence", "clause"])
def test_work_grows_with_the_text_only(text: str, granularity: Granularity) -> None:
    """Counted in calls of Python code, which a text twice as long has twice as many of."""

    def calls(text: str) -> int:
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            pieces = split(text, granularity, 4096)
        finally:
            sys.setprofile(None)
        assert "".join(pieces) == text
        return count

    assert calls(text) < 3 * calls(text[: len(text) // 2]) + 1000
