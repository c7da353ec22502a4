# SPDX-License-Identifier: Apache-2.0
"""The delay pattern of MOSS-TTS, where text tokens say what a row of codes is.

A row is a text token and a code per group. Before a sound the model writes text; `start` begins the
sound. Then each row is a *slot*: `generate` while frames begin, group k joining k rows later; the
first `delay` is said by the model, where the last frame begins; the following ones are forced, and
group k leaves k rows later; `stop` closes the sound. Codes that are not in their turn are `pad`.
(Reference: `MossTTSDelayModel.generate` of the published checkpoints.)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """Text tokens with a meaning.

    Attributes:
        start: Begins a sound.
        stop: Closes it.
        generate: A slot.
        delay: A slot after the last frame has begun.
        end: Of the whole answer.
        pad: None.
    """

    start: int
    stop: int
    generate: int
    delay: int
    end: int
    pad: int


class SlotStep(NamedTuple):
    """One row of each of b requests.

    Attributes:
        text: int64 [b].
        codes: int64 [b, groups].
        ended: bool [b]; the sound is closed, or the answer has ended without one.
        memory: int64 [b, `SlotPattern.MEMORY`], for the next row.
    """

    text: torch.Tensor
    codes: torch.Tensor
    ended: torch.Tensor
    memory: torch.Tensor


class SlotPattern(nn.Module):
    """How far each request is, and what its row may hold; a module for its device only.

    What it notes per request is the number of rows, how many of them are of the sound, how many of
    these came since `delay` was said first (that one included), and whether there is a sound.

    Args:
        groups: Codes per row.
        vocabulary: Text tokens.
        tokens: With a meaning.
        pad: The code that is none.
    """

    MEMORY = 4

    def __init__(self, groups: int, vocabulary: int, tokens: SlotTokens, pad: int) -> None:
        super().__init__()
        self.tokens, self.pad = tokens, pad
        self.groups: torch.Tensor
        self.in_sound: torch.Tensor
        self.in_text: torch.Tensor
        self.register_buffer("groups", torch.arange(groups), persistent=False)
        in_sound = torch.zeros(vocabulary, dtype=torch.bool)
        in_sound[[tokens.generate, tokens.delay]] = True
        in_text = ~in_sound
        in_text[[tokens.pad, tokens.stop]] = False
        self.register_buffer("in_sound", in_sound, persistent=False)
        self.register_buffer("in_text", in_text, persistent=False)

    def allowed(self, memory: torch.Tensor) -> torch.Tensor:
        """Which text tokens the next row may have, bool [b, vocabulary]."""
        rows, _, _, sounding = memory.unbind(dim=1)
        allowed = torch.where(sounding[:, None] > 0, self.in_sound, self.in_text)
        allowed[:, self.tokens.delay] &= rows > 0
        allowed[:, self.tokens.end] &= rows > len(self.groups)
        return allowed

    def step(self, text: torch.Tensor, codes: torch.Tensor, memory: torch.Tensor) -> SlotStep:
        """The next row of each request.

        Args:
            text: int64 [b], drawn of what is allowed.
            codes: int64 [b, groups], drawn.
            memory: int64 [b, MEMORY].
        """
        tokens, count = self.tokens, len(self.groups)
        rows, length, since, sounding = memory.unbind(dim=1)
        text = torch.where((since > 0) & (since < count), tokens.delay, text)
        text = torch.where(since == count, tokens.stop, text)
        begun = length[:, None] > self.groups
        left = (since[:, None] > 0) & (self.groups < since[:, None])
        codes = torch.where(begun & ~left, codes, self.pad)
        starts, stops, delays = text == tokens.start, text == tokens.stop, text == tokens.delay
        slots = starts | delays | (text == tokens.generate)
        length = torch.where(stops, 0, length + slots)
        since = torch.where(since > 0, since + 1, delays.long())
        since = torch.where(since > count, 0, since)
        sounding = (starts | (sounding > 0)) & ~stops
        noted = torch.stack([rows + 1, length, since, sounding.long()], dim=1)
        return SlotStep(text, codes, stops | (text == tokens.end), noted)
