# SPDX-License-Identifier: Apache-2.0
"""Parts that Qwen's talkers have in common."""

import torch
from torch import nn
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import QuantizationConfig

SUPPRESSED_TAIL = 1024
"""The last so many ids of the codec vocabulary are special; of them only the end is sampled."""


class ResizeMLP(nn.Module):
    """Projects rows to the talker's width.

    Replicated over tensor-parallel ranks: it is small, and needs no communication this way.

    Args:
        width: Of the rows.
        inner: Width in between.
        out: The talker's.
        act: Name of the activation.
        quant_config: vLLM's.
        prefix: Of its weights.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        out: int,
        act: str,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.linear_fc1 = _linear(width, inner, quant_config, f"{prefix}.linear_fc1")
        self.linear_fc2 = _linear(inner, out, quant_config, f"{prefix}.linear_fc2")
        self.act_fn = get_act_fn(act)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, out]."""
        return self.linear_fc2(self.act_fn(self.linear_fc1(rows)))


def _linear(
    width: int, out: int, quant_config: QuantizationConfig | None, prefix: str
) -> ReplicatedLinear:
    return ReplicatedLinear(width, out, quant_config=quant_config, return_bias=False, prefix=prefix)


def forbid_specials(logits: torch.Tensor, end: int) -> torch.Tensor:
    """Logits [n, vocabulary] with those of special codes other than the end at -inf, in place."""
    end_logit = logits[:, end].clone()
    logits[:, max(logits.shape[-1] - SUPPRESSED_TAIL, 0) :] = float("-inf")
    logits[:, end] = end_logit
    return logits
