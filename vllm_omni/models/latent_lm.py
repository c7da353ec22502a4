# SPDX-License-Identifier: Apache-2.0
"""The language model of a text-to-speech checkpoint whose frames are vectors, not codes.

What vLLM samples says only whether there is a frame; the frame itself is drawn inside of the step,
from noise, by a small network that denoises it (`frames`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.row_fed import RowFed


class LatentLM(RowFed, ABC):
    """`RowDriven`; rows are those of a `SpeechPrompt`: a text token or, else, a vector.

    Attributes:
        omni_capabilities: What is emitted, and what is kept from frame to frame.
    """

    omni_capabilities: OmniCapabilities

    @abstractmethod
    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """Text tokens, int [n] -> [n, input_width]."""

    @abstractmethod
    def embed_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """Frames of a recording, [n, frame width] -> [n, input_width]."""

    @abstractmethod
    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`."""

    def row_inputs(
        self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `RowDriven`; rows are int32 `text` [n], -1 where there is a vector, and floating
        `vector` [n, frame width]."""
        text = rows["text"]
        inputs = self.embed_text(text.clamp_min(0))
        if "vector" not in rows:
            return inputs
        return torch.where((text >= 0)[:, None], inputs, self.embed_vectors(rows["vector"]))
