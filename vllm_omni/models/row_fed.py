# SPDX-License-Identifier: Apache-2.0
"""What all row-driven model classes have in common."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sequence import IntermediateTensors


class RowFed(nn.Module):
    """A vLLM model class whose inputs are rows: a backbone like Llama, and what is around it.

    Attributes:
        model: The backbone.
        input_width: Width of what is fed.
        hf_to_vllm_mapper: Names of the checkpoint's weights, without those of other stages.
    """

    model: nn.Module
    input_width: int
    hf_to_vllm_mapper: WeightsMapper
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    @classmethod
    def get_model_state_cls(cls) -> type[Any]:
        """vLLM's Model Runner V2 asks for it; that runner, and so the class, needs Triton."""
        from vllm_omni.platforms.cuda.model_state import RowModelState

        return RowModelState

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """The backbone's hidden states, [n, ...] (final norm's); positions are [n] or [3, n]."""
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(None, positions, intermediate_tensors, inputs_embeds)

    def combine(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `RowDriven`; the backbone takes them as they are."""
        return inputs

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what belongs to this stage."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
