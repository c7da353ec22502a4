# SPDX-License-Identifier: Apache-2.0
"""Embedding the codes of several groups, and drawing them at once where none depends on another."""

from dataclasses import replace

import torch
from torch import nn

from vllm_omni.models.depth import draw
from vllm_omni.models.interfaces import FrameSampling

_AGAIN = 1
"""Stream of what is drawn for the same codes a second time."""


class GroupTables(nn.Embedding):
    """Embeddings of all groups' codes, one table after another in one weight.

    Args:
        groups: Codes per row.
        size: Codes per group, special ones included.
        width: Of an embedding.
    """

    def __init__(self, groups: int, size: int, width: int) -> None:
        super().__init__(groups * size, width)
        self._size = size
        self.offsets: torch.Tensor
        self.register_buffer("offsets", torch.arange(groups) * size, persistent=False)

    def of(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """Codes of a group, int [n] -> [n, width]."""
        return self(codes + group * self._size)

    def summed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum over groups, int [n, groups] -> [n, width]."""
        return self(codes + self.offsets).sum(dim=-2)


def draw_groups(logits: torch.Tensor, sampling: FrameSampling, stream: int = 0) -> torch.Tensor:
    """One code per group and request, as `draw` draws one per request.

    Args:
        logits: float32 [b, groups, vocabulary].
        sampling: Parameters of the b requests.
        stream: Distinguishes the draws for one position; 1 is taken.

    Returns:
        int64 [b, groups].
    """
    if sampling.all_greedy:
        return logits.argmax(dim=-1)
    noise = sampling.noise.exponential(*logits.shape[1:], stream=stream)
    groups = logits.shape[1]
    each = replace(
        sampling,
        temperature=sampling.temperature.repeat_interleave(groups),
        top_k=sampling.top_k.repeat_interleave(groups),
        top_p=sampling.top_p.repeat_interleave(groups),
    )
    return draw(logits.flatten(0, 1), each, noise.flatten(0, 1)).view(-1, groups)


def draw_untempered(logits: torch.Tensor, sampling: FrameSampling) -> torch.Tensor:
    """As `draw_groups`, by the model's own probabilities, of requests that are not greedy."""
    noise = sampling.noise.exponential(*logits.shape[1:], stream=_AGAIN)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)
