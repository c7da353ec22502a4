# SPDX-License-Identifier: Apache-2.0
"""The language model of a text-to-speech checkpoint whose frames are vectors, not codes.

What vLLM samples says only whether there is a frame; the frame itself is drawn inside of the step,
from noise, by a small network that denoises it (`frames`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities


class LatentLM(nn.Module, ABC):
    """`RowDriven`; rows are those of a `SpeechPrompt`: a text token or, else, a vector.

    Attributes:
        input_width: Width of embeddings.
        omni_capabilities: What is emitted, and what is kept from frame to frame.
        hf_to_vllm_mapper: Names of the checkpoint's weights, without those of other stages.
    """

    input_width: int
    omni_capabilities: OmniCapabilities
    hf_to_vllm_mapper: WeightsMapper
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

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

    def combine(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `RowDriven`; nothing is left to be done."""
        return inputs

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what belongs to this stage."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
