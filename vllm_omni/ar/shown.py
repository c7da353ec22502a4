# SPDX-License-Identifier: Apache-2.0
"""Which of a request's tokens its text shows for good, where a stop string may still cut it."""

import math


class ShownTokens:
    """Counts the tokens of one request that are shown whole and cannot be cut off any more.

    vLLM keeps back as much text as a stop string can still take, so what has been shown stays.

    Attributes:
        count: How many of the first tokens these are.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ends: list[float] = []

    def add(self, tokens: int, length: int, kept_back: int, cut: bool, finished: bool) -> int:
        """Take in one output; returns `count`.

        Args:
            tokens: New tokens.
            length: Characters of the whole text.
            kept_back: How many of these a stop string may still take.
            cut: A stop string has ended the text: the new tokens hold the end of it.
            finished: Nothing follows, so nothing is kept back.
        """
        self._ends += [math.inf if cut else length] * tokens
        shown = length if finished else length - kept_back
        while self.count < len(self._ends) and self._ends[self.count] <= shown:
            self.count += 1
        return self.count
