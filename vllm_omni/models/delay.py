# SPDX-License-Identifier: Apache-2.0
"""The delay pattern inside of a codec language model: what each request's next row must hold.

See `speech.delay` for the pattern. The row in which the model says for the first time that it ends
starts the ramp-down: `delays[k]` rows later group k ends by force. A stream closes with a row of
nothing but end codes, or already with the row before it, the last one that holds a code.
(References: transformers' `HiggsAudioV2DelayPatternLogitsProcessor`; row A-60 for Higgs-Audio v3.)
"""

from typing import NamedTuple

import torch
from torch import nn

FREE = -1
"""In forced codes: the model draws."""


class DelayStep(NamedTuple):
    """One row of each of b requests.

    Attributes:
        codes: int64 [b, groups].
        ended: bool [b]; the row is the last.
        memory: int64 [b, `DelayPattern.MEMORY`], for the next row.
    """

    codes: torch.Tensor
    ended: torch.Tensor
    memory: torch.Tensor


class DelayPattern(nn.Module):
    """How far each request is, and what its row must hold; a module for its device only.

    What it notes per request is the number of rows so far, and how many of them came since the
    end was said (that one included). Zeros are a request without rows.

    Args:
        delays: Of each group, in rows; ascending.
        begin: The begin code.
        end: The end code.
        closing_row: The last row is all end codes, not the one before it.
    """

    MEMORY = 2

    def __init__(
        self, delays: tuple[int, ...], begin: int, end: int, closing_row: bool = True
    ) -> None:
        super().__init__()
        self.begin, self.end = begin, end
        self._last = max(1, *delays)
        self._closing_row = closing_row
        self.delays: torch.Tensor
        self.register_buffer("delays", torch.tensor(delays), persistent=False)

    def forced(self, memory: torch.Tensor) -> torch.Tensor:
        """What the next row must hold, int64 [b, groups]; `FREE` where the model draws."""
        rows, since_end = memory[:, :1], memory[:, 1:]
        free = torch.full_like(rows, FREE)
        wanted = torch.where(self.delays > rows, self.begin, free)
        return torch.where((self.delays <= since_end) & (since_end > 0), self.end, wanted)

    def without_specials(self, logits: torch.Tensor, first: bool = False) -> torch.Tensor:
        """Logits of what the model may draw, in place: no group begins of its own accord, and only
        the first one says the end (row A-60).

        Args:
            logits: [b, groups, vocabulary], or [b, vocabulary] of the first group.
            first: They are the first group's.
        """
        never = float("-inf")
        logits[..., self.begin] = never
        if not first:
            logits[:, 1:, self.end] = never
        return logits

    def step(self, drawn: torch.Tensor, memory: torch.Tensor) -> DelayStep:
        """The next row of each request, given what the model drew, int64 [b, groups]."""
        forced = self.forced(memory)
        codes = torch.where(forced == FREE, drawn, forced)
        is_end = codes == self.end
        rows, since_end = memory.unbind(dim=1)
        ending = is_end.any(dim=1) | (since_end > 0)
        since_end = since_end + ending
        ended = is_end.all(dim=1) if self._closing_row else since_end >= self._last
        return DelayStep(codes, ended, torch.stack([rows + 1, since_end], dim=1))
