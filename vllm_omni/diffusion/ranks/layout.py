# SPDX-License-Identifier: Apache-2.0
"""How ranks share the work of a forward."""

from dataclasses import dataclass
from typing import Self

from vllm_omni.config.plan import PipelineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the groups. Ranks of one tensor parallel group are neighbours, then those of one
    sequence, and those that have different rows are farthest apart: the more is exchanged, the
    closer.

    Attributes:
        cfg: Groups that take different rows of a batch: the halves of guidance, if it is one's.
        ulysses: Ranks of each of them that take different tokens.
        tensor: Ranks that take different heads and columns.
    """

    cfg: int = 1
    ulysses: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, settings: PipelineSettings) -> Self:
        """What a deployment asks for."""
        return cls(
            cfg=settings.cfg_parallel_size,
            ulysses=settings.ulysses_degree,
            tensor=settings.tensor_parallel_size,
        )

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.cfg * self.share_size

    @property
    def share_size(self) -> int:
        """How many ranks take the same rows."""
        return self.ulysses * self.tensor

    def share_of(self, rank: int) -> int:
        """Which rows a rank takes."""
        return rank // self.share_size

    def leader_of(self, share: int) -> int:
        """The rank that sends what came of a share."""
        return share * self.share_size
