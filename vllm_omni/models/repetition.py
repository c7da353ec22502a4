# SPDX-License-Identifier: Apache-2.0
"""Repetition-aware sampling: a code that a group has repeated too often is drawn anew.

Codec language models get stuck in loops when they are sampled with a low temperature. Where a drawn
code stands in several of the last rows of its group already, it is drawn again by the model's own
probabilities. (Reference: `ras_win_len` and `ras_win_max_num_repeat` in transformers' generation of
Higgs-Audio v2, which does so under greedy decoding, too; here greedy is greedy.)
"""

from dataclasses import dataclass

import torch

from vllm_omni.models.groups import draw_untempered
from vllm_omni.models.interfaces import FrameSampling


@dataclass(frozen=True, slots=True)
class Repetition:
    """What is too often. What it notes per request are its last rows, each code plus one; zeros are
    no code.

    Attributes:
        rows: How many of the last ones are looked at.
        most: So many times is too often.
        ignored: Codes that may be repeated: those of the pattern.
    """

    rows: int
    most: int
    ignored: tuple[int, ...]

    def memory(self, groups: int) -> int:
        """Numbers that it notes per request."""
        return self.rows * groups

    def redrawn(
        self,
        drawn: torch.Tensor,
        logits: torch.Tensor,
        memory: torch.Tensor,
        sampling: FrameSampling,
    ) -> torch.Tensor:
        """Codes int64 [b, groups], those of `drawn` but for what is too often.

        Args:
            drawn: int64 [b, groups].
            logits: float32 [b, groups, vocabulary], as the model made them.
            memory: int64 [b, rows * groups].
            sampling: Parameters of the b requests; not all of them greedy.
        """
        window = memory.view(len(drawn), self.rows, -1)
        too_often = (window == drawn[:, None] + 1).sum(dim=1) >= self.most
        for code in self.ignored:
            too_often &= drawn != code
        too_often &= (sampling.temperature > 0)[:, None]
        return torch.where(too_often, draw_untempered(logits, sampling), drawn)

    def noted(self, codes: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """The memory with one row more, and the oldest one forgotten."""
        return torch.cat([memory[:, codes.shape[1] :], codes + 1], dim=1)
