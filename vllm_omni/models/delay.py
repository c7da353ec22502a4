# SPDX-License-Identifier: Apache-2.0
"""The delay pattern inside of a codec language model: what each request's next row must hold.

See `speech.delay` for the pattern. The row in which the model says for the first time that it ends
starts the ramp-down: `delays[k]` rows later group k ends by force, so the stream closes with a row
of nothing but end codes. (Reference: transformers' `HiggsAudioV2DelayPatternLogitsProcessor`.)
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
        ended: bool [b]; the row is all end codes, and the last.
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
    """

    MEMORY = 2

    def __init__(self, delays: tuple[int, ...], begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end
        self.delays: torch.Tensor
        self.register_buffer("delays", torch.tensor(delays), persistent=False)

    def forced(self, memory: torch.Tensor) -> torch.Tensor:
        """What the next row must hold, int64 [b, groups]; `FREE` where the model draws."""
        rows, since_end = memory[:, :1], memory[:, 1:]
        free = torch.full_like(rows, FREE)
        wanted = torch.where(self.delays > rows, self.begin, free)
        return torch.where(self.delays <= since_end, self.end, wanted)

    def step(self, drawn: torch.Tensor, memory: torch.Tensor) -> DelayStep:
        """The next row of each request, given what the model drew, int64 [b, groups]."""
        forced = self.forced(memory)
        codes = torch.where(forced == FREE, drawn, forced)
        is_end = codes == self.end
        rows, since_end = memory.unbind(dim=1)
        ending = is_end.any(dim=1) | (since_end > 0)
        noted = torch.stack([rows + 1, since_end + ending], dim=1)
        return DelayStep(codes, is_end.all(dim=1), noted)
