# SPDX-License-Identifier: Apache-2.0
"""Cutting text that comes piece by piece into sentences or clauses, which are spoken one by one.

The pieces joined are the text. Where it is cut does not depend on how it came: a mark is decided on
when the character behind it is known.
"""

from dataclasses import dataclass
from typing import Literal

import regex as re

Granularity = Literal["none", "sentence", "clause"]

MIN_CLAUSE = 12
"""Characters before which a clause is not worth a generation of its own."""

_CLOSERS = "\"'”’»)]」』）】》〉"
_SPACED_ENDS = ".!?…؟۔"
"""Marks that end a sentence if a space follows them."""
_ENDS = "。！？｡．।॥។៕"
"""Marks that end a sentence whatever follows them."""
_SPACED_PAUSES = ",;:،؛"
_PAUSES = "，、；：—"
_SPACES = "".join(chr(c) for c in range(0x3001) if chr(c).isspace())
_UNDECIDED = _CLOSERS + _SPACED_ENDS + _ENDS + _SPACED_PAUSES + _PAUSES + _SPACES
"""What may belong to a mark that is not whole yet."""


def _any(characters: str) -> str:
    return f"[{re.escape(characters, special_only=False)}]"


# Possessive throughout: a mark at the end of what has come is no end yet. A run of marks or spaces
# is looked at from its beginning only, so that a long one costs no more than its length.
_SENTENCE = re.compile(
    rf"(?:{_any(_ENDS)}(?:{_any(_ENDS)}|[!?…])*+{_any(_CLOSERS)}*+(?=[\s\S]))"
    rf"|(?:(?<!{_any(_SPACED_ENDS)})(?P<spaced>{_any(_SPACED_ENDS)}++){_any(_CLOSERS)}*+(?=\s))"
    r"|(?:(?<!\s)(?P<space>\s++)(?=\S))"
)
_CLAUSE = re.compile(
    rf"(?:{_any(_SPACED_PAUSES)}{_any(_CLOSERS)}*+(?=\s))"
    rf"|(?:(?:[，、；：]|(?<!—)—++){_any(_CLOSERS)}*+(?=[\s\S]))"
)
_WORD_BEFORE = re.compile(r"[\p{L}\p{M}.]+$")
_NUMBER_ONLY = re.compile(r"\s*+\p{N}{1,3}$")
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "gen", "sen", "rep", "gov", "capt"),
        *("lt", "col", "sgt", "rev", "hon", "vs", "etc", "nos", "vol", "fig", "eq", "sec"),
        *(
            "ca",
            "cf",
            "al",
            "approx",
            "dept",
            "est",
            "inc",
            "ltd",
            "co",
            "corp",
            "mt",
            "ave",
            "blvd",
        ),
        *("e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "u.n", "d.c", "ph.d", "z.b", "d.h", "u.a"),
        *("hr", "fr", "nr", "bzw", "usw", "mme", "mlle", "sra", "srta", "ud", "uds", "núm", "pág"),
        *("jan", "feb", "apr", "jun", "jul", "aug", "sept", "oct", "nov", "dec"),
    )
)


_LONGEST_WORD = max(map(len, _ABBREVIATIONS)) + 1
"""Characters before a dot that are looked at: of a longer word it is no abbreviation's."""


@dataclass(slots=True)
class _Search:
    """The next mark of a kind. What lies before `position` has none."""

    marks: "re.Pattern[str]"
    position: int = 0


class TextSplitter:
    """Cuts text into pieces, in a time that grows with the text only.

    Args:
        granularity: Where to cut; with `none` only where a piece would be too long.
        max_chars: Most characters of a piece.
    """

    def __init__(self, granularity: Granularity, max_chars: int) -> None:
        self._max_chars = max_chars
        self._text = ""
        self._start = 0
        """Of the next piece in the text."""
        self._sentence = None if granularity == "none" else _Search(_SENTENCE)
        self._clause = _Search(_CLAUSE) if granularity == "clause" else None

    def __len__(self) -> int:
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """Add text; the pieces that are whole by now, in order."""
        self._text += text
        pieces = []
        while (end := self._next_end()) is not None:
            pieces.append(self._text[self._start : end])
            self._start = end
        self._forget()
        return pieces

    def flush(self) -> list[str]:
        """The rest."""
        rest = self._text
        self._start = len(rest)
        self._forget()
        return [rest] if rest else []

    def _forget(self) -> None:
        """Drop the pieces that have been cut off."""
        for search in self._searches():
            search.position = max(0, search.position - self._start)
        self._text = self._text[self._start :]
        self._start = 0

    def _searches(self) -> list[_Search]:
        return [search for search in (self._sentence, self._clause) if search is not None]

    def _next_end(self) -> int | None:
        ends = [end for search in self._searches() if (end := self._first(search)) is not None]
        if ends:
            return min(ends)
        if len(self._text) - self._start > self._max_chars:
            return _forced_end(self._text, self._start, self._max_chars)
        return None

    def _first(self, search: _Search) -> int | None:
        """Where the first mark of a kind ends a piece, if one does in time.

        What lies before the piece does not count, or it would matter how the text came.
        """
        start = self._start
        window = self._text[start : start + self._max_chars + 1]
        search.position = max(search.position, start)
        for match in search.marks.finditer(window, search.position - start):
            end = int(match.end())
            if end > self._max_chars:
                search.position = start + int(match.start())
                return None
            if self._is_end(search, match) and window[:end].strip():
                search.position = start + int(match.start())  # of a later piece it may be no end
                return start + end
            search.position = start + end
        decided = len(window.rstrip(_UNDECIDED))
        search.position = max(search.position, start + decided)
        return None

    def _is_end(self, search: _Search, match: "re.Match[str]") -> bool:
        if search is self._clause:
            return int(match.end()) >= MIN_CLAUSE
        if match["space"] is not None:
            return "\n" in match["space"]
        return match["spaced"] != "." or _is_full_stop(match.string, match.start())


def _is_full_stop(piece: str, dot: int) -> bool:
    """Whether a dot is none of an abbreviation, an initial or a list's number."""
    word = _WORD_BEFORE.search(piece, max(0, dot - _LONGEST_WORD), dot)
    if word is None:
        return _NUMBER_ONLY.fullmatch(piece, 0, dot) is None
    name = word[0].casefold()
    is_initial = len(name) == 1 and word[0].isupper() and name != "i"
    return not (is_initial or name in _ABBREVIATIONS)


def _forced_end(text: str, start: int, most: int) -> int:
    """Where a text without a mark in time is cut: behind a pause, a space, or anywhere."""
    window = text[start : start + most + 1]
    pauses = [int(m.end()) for m in _CLAUSE.finditer(window) if m.end() <= most]
    if pauses and pauses[-1] > most // 2:
        return start + pauses[-1]
    space = window.rfind(" ", 1, most)
    return start + (space if space > 0 and window[:space].strip() else most)
