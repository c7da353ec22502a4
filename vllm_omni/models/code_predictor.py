# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's code predictor, run over a batch of requests at once.

Reference: transformers' `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`, whose names
of parameters it has.
"""

import torch
from torch import nn
from transformers import Qwen3OmniMoeTalkerCodePredictorConfig

from vllm_omni.models.depth import DepthModel
from vllm_omni.models.depth_layers import DepthConfig, DepthTransformer


class CodePredictor(DepthModel):
    """See `DepthModel`.

    Args:
        config: The talker config's `code_predictor_config`.
        width: Of inputs and embeddings. Default: the predictor's own.
    """

    def __init__(
        self, config: Qwen3OmniMoeTalkerCodePredictorConfig, width: int | None = None
    ) -> None:
        super().__init__()
        groups = config.num_code_groups
        self.drawn_groups, self.drawn_vocabulary = groups - 1, config.vocab_size
        self.model = DepthTransformer(DepthConfig.of(config, groups, head_norm=True))
        width = width or config.hidden_size
        self.model.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, width) for _ in range(groups - 1)
        )
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(groups - 1)
        )

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`: the same, here."""
        return inputs.clone()  # the decoder writes over its inputs

    def code_logits(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.lm_head[index](hidden)

    def code_embeds(self, index: int, codes: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.model.codec_embedding[index](codes)
