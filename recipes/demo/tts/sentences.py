# SPDX-License-Identifier: Apache-2.0
"""What is spoken for training: strings of words that mean nothing, so that every one is heard.

The words and how common they are come from the package `pyspellchecker`.
"""

import gzip
import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np

_WORD = re.compile(r"[a-z]+('[a-z]+)?")
_LEAST_COUNT = 120
_LONGEST_WORD = 15
_COMMON, _KNOWN = 0.35, 0.8
"""Of all words, up to where they are drawn by how common they are, and by the square root of it."""
_PHRASES = """
of the|in the|to the|on the|at the|for the|from the|with the|by the|into the|out of the|and the
in a|of a|to a|with a|for a|as a|like a|such a|what a|is a|was a|and a|it is|it was|there is|there
are|there was|there were|this is|that is|he is|she is|they are|we are|you are|I am|I have|we have
you have|they have|he has|she has|has been|have been|had been|will be|would be|can be|could be
should be|may be|must be|to be|going to|want to|wants to|have to|has to|had to|need to|able to|used
to|would like|would have|could have|do not|does not|did not|is not|was not|are not|cannot be|don't
know|I think|I don't|I'm|you're|it's|that's|he's|we're|they're|I've|we've|I'll|you'll|let me|let's
can you|could you|do you|did you|how do|how to|what is|what are|where is|who is|why did|when the
when he|when she|when we|if you|if the|as the|than the|more than|one of the|some of the|all of the
most of the|part of the|because of|because the|in front of|next to|up to|a lot of|a few|a little
the same|the first|the second|the last|the best|the other|each other|as well as|such as|for example
at home|at least|at first|last year|last night|next week|this morning|every day|years ago|so that
his own|her own|my own|of his|of her|of my|in his|in her|to his|to her|with his|with her|and he
and she|and I|and they|that he|that she|that the|that it|which is|who was|after the|before the
during the|over the|under the|behind the|near the|between the|around the|through the|without a
"""
_PHRASE_SHARE = 0.3
_COMMA, _NUMBER, _OTHER_MARK = 0.06, 0.02, 0.01
_ENDS = (".", ".", ".", ".", ".", ".", "?", "?", "!", "", ",", ":")
_OTHER_MARKS = (";", ":", " -", " \u2014")
_LOWER, _CURLY, _QUOTED = 0.12, 0.3, 0.02
_MOST_CHARACTERS = 170


def word_counts(path: Path | None = None) -> dict[str, int]:
    """Words and how often they were seen.

    Args:
        path: A copy of the package's `en.json.gz`, where the package is not installed.
    """
    source = path or files("spellchecker") / "resources" / "en.json.gz"
    counts = json.loads(gzip.decompress(source.read_bytes()))
    return {
        word: count
        for word, count in counts.items()
        if count >= _LEAST_COUNT and len(word) <= _LONGEST_WORD and _WORD.fullmatch(word)
    }


class Sentences:
    """Draws them.

    Args:
        counts: See `word_counts`.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        self._words = np.array(list(counts))
        weights = np.array(list(counts.values()), dtype=np.float64)
        self._common = np.cumsum(weights**0.75) / np.sum(weights**0.75)
        self._known = np.cumsum(weights**0.4) / np.sum(weights**0.4)
        self._phrases = _PHRASES.replace("\n", "|").strip("|").split("|")

    def draw(self, rng: np.random.Generator) -> str:
        """One sentence, of up to `_MOST_CHARACTERS` characters."""
        wanted = int(np.clip(rng.gamma(3.0, 2.7), 1, 30))
        parts: list[str] = []
        while len(parts) < wanted:
            parts.append(self._part(rng))
        text = " ".join(parts)
        if len(text) > _MOST_CHARACTERS:
            text = text[:_MOST_CHARACTERS].rpartition(" ")[0]
        return self._dressed(text.rstrip(" ,;:-\u2014"), rng)

    def _part(self, rng: np.random.Generator) -> str:
        if rng.random() < _PHRASE_SHARE:
            return self._phrases[rng.integers(len(self._phrases))]
        luck = rng.random()
        if luck < _NUMBER:
            return str(rng.integers(10 ** rng.integers(1, 5)))
        word = self._word(rng)
        if luck > 1 - _COMMA:
            return f"{word},"
        if luck > 1 - _COMMA - _OTHER_MARK:
            return word + _OTHER_MARKS[rng.integers(len(_OTHER_MARKS))]
        if luck > 1 - _COMMA - _OTHER_MARK - _QUOTED:
            return f'"{word}"'
        return word

    def _word(self, rng: np.random.Generator) -> str:
        kind, luck = rng.random(), rng.random()
        if kind < _COMMON:
            index = np.searchsorted(self._common, luck)
        elif kind < _KNOWN:
            index = np.searchsorted(self._known, luck)
        else:
            index = int(luck * len(self._words))
        word = str(self._words[min(index, len(self._words) - 1)])
        return re.sub(r"^i(?=$|')", "I", word)

    def _dressed(self, text: str, rng: np.random.Generator) -> str:
        if rng.random() >= _LOWER:
            text = text[0].upper() + text[1:]
        if rng.random() < _CURLY:
            text = re.sub(r'"([^"]*)"', "\u201c\\1\u201d", text.replace("'", "\u2019"))
        return text + _ENDS[rng.integers(len(_ENDS))]
