# SPDX-License-Identifier: Apache-2.0
"""What is a text that can be spoken."""

import unicodedata

_LINE_BREAKS = "\n\r\t"
_SPOKEN = "LN"
"""First letters of the Unicode categories of which a text needs one character at least."""
_NO_TEXT = ("Cc", "Cs")
"""Categories of control characters and of surrogates, halves of characters."""


def is_speakable(text: str) -> bool:
    """Whether there is a letter or a digit in it: anything else is no reason to make a sound."""
    return any(unicodedata.category(character)[0] in _SPOKEN for character in text)


def first_control(text: str) -> int | None:
    """Position of the first character that is none of a text: a surrogate, or a control character
    other than line breaks and tabs. None if there is none."""
    for position, character in enumerate(text):
        if unicodedata.category(character) in _NO_TEXT and character not in _LINE_BREAKS:
            return position
    return None


def first_surrogate(text: str) -> int | None:
    """Position of the first half of a character, which no encoding has; None if there is none."""
    found = (i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    return next(found, None)
