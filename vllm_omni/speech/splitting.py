# SPDX-License-Identifier: Apache-2.0
"""Cutting text that comes piece by piece into sentences or clauses, which are spoken one by one.

The pieces joined are the text. Where it is cut does not depend on how it came: a mark is decided on
when the character behind it is known.
"""

from collections.abc import Iterator
from typing import Literal

import regex as re

Granularity = Literal["none", "sentence", "clause"]

MIN_CLAUSE = 12
"""Characters before which a clause is not worth a generation of its own."""

_CLOSERS = r"[\"'”’»)\]」』）】》〉]*+"
_SPACED_ENDS = r"[.!?…؟۔]++"
"""Marks that end a sentence if a space follows them."""
_ENDS = r"[。！？｡．।॥።։។៕]"
"""Marks that end a sentence whatever follows them."""
_SPACED_PAUSES = r"[,;:،؛]"
_PAUSES = r"(?:[，、；：]|—++)"

# Possessive throughout: a mark at the end of what has come is no end yet.
_SENTENCE = re.compile(
    rf"(?:{_ENDS}(?:{_ENDS}|[!?…])*+{_CLOSERS}(?=[\s\S]))"
    rf"|(?:(?P<spaced>{_SPACED_ENDS}){_CLOSERS}(?=\s))"
    r"|(?:\n\s*+(?=\S))"
)
_CLAUSE = re.compile(rf"(?:{_SPACED_PAUSES}{_CLOSERS}(?=\s))|(?:{_PAUSES}{_CLOSERS}(?=[\s\S]))")
_WORD_BEFORE = re.compile(r"[\p{L}\p{M}.]+$")
_NUMBER_ONLY = re.compile(r"\s*\p{N}{1,3}$")
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


class TextSplitter:
    """Cuts text into pieces.

    Args:
        granularity: Where to cut; with `none` only where a piece would be too long.
        max_chars: Most characters of a piece.
    """

    def __init__(self, granularity: Granularity, max_chars: int) -> None:
        self._granularity = granularity
        self._max_chars = max_chars
        self._text = ""

    def __len__(self) -> int:
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """Add text; the pieces that are whole by now, in order."""
        self._text += text
        pieces = []
        while (end := self._next_end()) is not None:
            pieces.append(self._text[:end])
            self._text = self._text[end:]
        return pieces

    def flush(self) -> list[str]:
        """The rest."""
        rest, self._text = self._text, ""
        return [rest] if rest else []

    def _next_end(self) -> int | None:
        ends = [end for end in self._ends() if end is not None]
        if ends:
            return min(ends)
        if len(self._text) > self._max_chars:
            return _forced_end(self._text, self._max_chars)
        return None

    def _ends(self) -> Iterator[int | None]:
        """Where the first sentence and the first clause end, if they do in time."""
        if self._granularity == "none":
            return
        yield self._first(m.end() for m in self._marks(_SENTENCE) if _is_end(self._text, m))
        if self._granularity == "clause":
            yield self._first(m.end() for m in self._marks(_CLAUSE) if m.end() >= MIN_CLAUSE)

    def _marks(self, kind: "re.Pattern[str]") -> "Iterator[re.Match[str]]":
        return kind.finditer(self._text, endpos=self._max_chars + 1)

    def _first(self, ends: Iterator[int]) -> int | None:
        return next((e for e in ends if e <= self._max_chars and self._text[:e].strip()), None)


def _is_end(text: str, match: "re.Match[str]") -> bool:
    """Whether the dot of an abbreviation, an initial or a list's number is none of a sentence's."""
    if match["spaced"] != ".":
        return True
    before = text[: match.start()]
    word = _WORD_BEFORE.search(before)
    if word is None:
        return _NUMBER_ONLY.fullmatch(before) is None
    name = word[0].casefold()
    is_initial = len(name) == 1 and word[0].isupper() and name != "i"
    return not (is_initial or name in _ABBREVIATIONS)


def _forced_end(text: str, most: int) -> int:
    """Where a text without a mark in time is cut: behind a pause, a space, or anywhere."""
    pauses = [m.end() for m in _CLAUSE.finditer(text, endpos=most + 1) if m.end() <= most]
    if pauses and pauses[-1] > most // 2:
        return int(pauses[-1])
    space = text.rfind(" ", 1, most)
    return space if space > 0 and text[:space].strip() else most
