# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's code predictor, run over a batch of requests at once."""

from copy import deepcopy

import torch
from transformers import Cache, DynamicCache, Qwen3OmniMoeTalkerCodePredictorConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

from vllm_omni.models.depth import DepthModel

# Without a mask, transformers' attention is causal over the first call's two positions, and over
# the cache for the single position of each later call.
_NO_MASK = {"full_attention": None}


class CodePredictor(Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration, DepthModel):
    """See `DepthModel`; inputs are as wide as the talker.

    Args:
        config: The talker config's `code_predictor_config`.
    """

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        config = deepcopy(config)
        # Inner modules take the config's dtype; vLLM says by the default dtype what it wants.
        config.dtype = torch.get_default_dtype()
        super().__init__(config)

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """The talker's vectors [..., width] at this model's width: the same, here."""
        return inputs

    @property
    def drawn_groups(self) -> int:
        """See `DepthModel`."""
        return len(self.lm_head)

    @property
    def drawn_vocabulary(self) -> int:
        """See `DepthModel`."""
        return self.config.vocab_size

    def new_cache(self) -> Cache:
        """See `DepthModel`."""
        return DynamicCache(config=self.config)

    def advance(self, inputs: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """See `DepthModel`."""
        output = self.model(
            inputs_embeds=self.project(inputs),
            attention_mask=_NO_MASK,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, -1]

    def code_logits(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.lm_head[index](hidden)

    def code_embeds(self, index: int, codes: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.model.codec_embedding[index](codes)
