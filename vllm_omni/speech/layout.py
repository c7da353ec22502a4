# SPDX-License-Identifier: Apache-2.0
"""Putting a prompt together, of which every position is a text token or a row of codes."""

from collections.abc import Sequence

import torch

from vllm_omni.speech.family import NOTHING, SpeechPrompt


class Layout:
    """A prompt from left to right.

    Args:
        groups: Codes per row.
    """

    def __init__(self, groups: int) -> None:
        self._silent = torch.full((1, groups), NOTHING, dtype=torch.int32)
        self._text: list[torch.Tensor] = []
        self._codes: list[torch.Tensor] = []

    def say(self, ids: Sequence[int]) -> None:
        """Text tokens."""
        self.both(ids, self._silent.expand(len(ids), -1))

    def sound(self, rows: torch.Tensor) -> None:
        """Rows of codes, int32 [n, groups]."""
        self.both([NOTHING] * len(rows), rows)

    def both(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Text tokens, and a row of codes beside each."""
        self._text.append(torch.tensor(ids, dtype=torch.int32))
        self._codes.append(rows)

    def made(self, placeholder: int) -> SpeechPrompt:
        """All of it is the prompt: what follows are the model's own rows."""
        text = torch.cat(self._text)
        return SpeechPrompt(
            length=len(text), text=text, codes=torch.cat(self._codes), placeholder=placeholder
        )
