# SPDX-License-Identifier: Apache-2.0
"""The codec language model of a text-to-speech checkpoint (DESIGN.md section 6).

A vLLM decoder is fed the sum of what stands at each position: a text token, a codec frame, a
vector; it samples the first code of the next frame. The other codes come from a small model inside
of the step (`CodecLM`) or from heads of their own, delayed (`DelayCodecLM`). A family says how its
parts are embedded and how a frame is completed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import nn

from vllm_omni.models.delay import DelayPattern
from vllm_omni.models.groups import draw_groups
from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.repetition import Repetition
from vllm_omni.models.row_fed import RowFed


class PromptFed(RowFed, ABC):
    """The input half of `RowDriven`: rows of a `SpeechPrompt`, `text`, `codes` and, of some,
    `vector`. The backbone is a Llama or what is built like one.

    Attributes:
        groups: Codes per frame.
    """

    groups: int

    @abstractmethod
    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """Text tokens, int [n] -> [n, input_width]."""

    @abstractmethod
    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """Codes of a group, int [n] -> [n, input_width]."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codes of the first group, int64 [n] -> [n, input_width]."""
        return self.embed_codes(0, input_ids)

    def row_inputs(
        self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `RowDriven`; rows are int32 `text` [n] and `codes` [n, groups], -1 for nothing, and
        floating `vector` [n, input_width]."""
        inputs = _where_given(rows["text"], self.embed_text)
        for group in range(self.groups):
            inputs = inputs + _where_given(
                rows["codes"][:, group], lambda ids, group=group: self.embed_codes(group, ids)
            )
        return inputs + rows["vector"] if "vector" in rows else inputs


class CodecLM(PromptFed):
    """`RowDriven`; a small model completes each frame. Special codes are in group 0 only.

    Attributes:
        model: The backbone, with the embeddings of first codes.
    """

    omni_capabilities: ClassVar[OmniCapabilities] = OmniCapabilities(
        row_driven=True, emits=("codes",)
    )
    model: nn.Module

    @abstractmethod
    def complete(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the codes of groups 1.. of each request's frame.

        Args:
            hidden: [b, hidden_size]; what the frame's first code was sampled from.
            first: [b, input_width]; the embedding of that code.
            sampling: How to draw.

        Returns:
            Codes int64 [b, groups - 1] and their embeddings [b, groups - 1, input_width].
        """

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; the frame part is the sum of the embeddings of all its codes."""
        first = self.embed_codes(0, token_ids)
        codes, embeds = self.complete(hidden, first, sampling)
        return Frames(
            codes=torch.cat([token_ids[:, None], codes], dim=1),
            inputs=torch.cat([first[:, None], embeds], dim=1).sum(dim=1),
        )


class DelayCodecLM(PromptFed):
    """`RowDriven`; every code has a head of its own, and the codes of a frame are delayed.

    What it emits are rows of the pattern, the last one (all end codes) included.

    Args:
        pattern: Of the delays.
        end_token: What counts as sampled with that last row; a stop token of the stage.
        repetition: What is drawn anew; None for nothing.
    """

    def __init__(
        self, pattern: DelayPattern, end_token: int, repetition: Repetition | None = None
    ) -> None:
        super().__init__()
        self.pattern = pattern
        self.groups = len(pattern.delays)
        self._end_token = end_token
        self._repetition = repetition
        noted = 0 if repetition is None else repetition.memory(self.groups)
        self.omni_capabilities = OmniCapabilities(
            row_driven=True, emits=("codes",), frame_memory=DelayPattern.MEMORY + noted
        )

    @abstractmethod
    def code_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of all groups, [b, hidden_size] -> float32 [b, groups, vocabulary]."""

    @abstractmethod
    def embed_row(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of a row's embeddings, int64 [b, groups] -> [b, input_width]."""

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; codes are replaced where the pattern forces them."""
        logits = self.code_logits(hidden)
        others = draw_groups(logits[:, 1:], sampling)
        drawn = torch.cat([token_ids[:, None], others], dim=1)
        memory, window = sampling.memory.tensor_split([DelayPattern.MEMORY], dim=1)
        if self._repetition is not None and not sampling.all_greedy:
            drawn = self._repetition.redrawn(drawn, logits, window, sampling)
        step = self.pattern.step(drawn, memory)
        noted = step.memory
        if self._repetition is not None:
            noted = torch.cat([noted, self._repetition.noted(step.codes, window)], dim=1)
        return Frames(
            codes=step.codes,
            inputs=self.embed_row(step.codes),
            tokens=torch.where(step.ended, self._end_token, step.codes[:, 0]),
            memory=noted,
        )


def _where_given(ids: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Embeddings of ids [n], zeros where there is none."""
    return embed(ids.clamp_min(0)) * (ids >= 0)[:, None]
