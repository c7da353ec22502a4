# SPDX-License-Identifier: Apache-2.0
"""MiniCPM4's decoder on vLLM's attention, as VoxCPM2 has it twice.

It is Llama's but for its residual scale, heads whose width is said apart, and long RoPE, of which
one set of factors is always used (or no RoPE at all).
"""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_omni.models.minicpm_shape import MiniCPMShape


class MiniCPMAttention(nn.Module):
    """Causal attention.

    Args:
        shape: Of the transformer.
        vllm_config: vLLM's.
        prefix: Of its weights.
        name: Of its cache: the layers of a model have different numbers in it.
    """

    def __init__(
        self, shape: MiniCPMShape, vllm_config: VllmConfig, prefix: str, name: str
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        heads, kv_heads = shape.heads // ranks, max(1, shape.kv_heads // ranks)
        self._sizes = [heads * shape.head_dim, *[kv_heads * shape.head_dim] * 2]
        self.qkv_proj = QKVParallelLinear(
            shape.width,
            shape.head_dim,
            shape.heads,
            shape.kv_heads,
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            shape.heads * shape.head_dim,
            shape.width,
            bias=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self._has_rope = shape.rope is not None
        if shape.rope is not None:
            self.rotary_emb = get_rope(
                shape.head_dim, max_position=shape.max_position, rope_parameters=shape.rope
            )
        self.attn = Attention(
            heads,
            shape.head_dim,
            shape.head_dim**-0.5,
            num_kv_heads=kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=name,
        )

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width]."""
        qkv, _ = self.qkv_proj(hidden)
        query, key, value = qkv.split(self._sizes, dim=-1)
        if self._has_rope:
            query, key = self.rotary_emb(positions, query, key)
        output, _ = self.o_proj(self.attn(query, key, value))
        return output


class MiniCPMDecoderLayer(nn.Module):
    """See `MiniCPMAttention`."""

    def __init__(
        self, shape: MiniCPMShape, vllm_config: VllmConfig, prefix: str, name: str
    ) -> None:
        super().__init__()
        self._scale = shape.residual_scale
        self.self_attn = MiniCPMAttention(shape, vllm_config, f"{prefix}.self_attn", name)
        self.mlp = LlamaMLP(
            hidden_size=shape.width,
            intermediate_size=shape.inner,
            hidden_act="silu",
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(shape.width, eps=shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.width, eps=shape.eps)

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width]."""
        stream = stream + self._scale * self.self_attn(positions, self.input_layernorm(stream))
        return stream + self._scale * self.mlp(self.post_attention_layernorm(stream))


class MiniCPMDecoder(nn.Module):
    """All layers, and the final norm.

    Args:
        shape: Of the transformer.
        vllm_config: vLLM's.
        prefix: Of its weights.
        first_layer: Number of its first layer among all of the model.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(
        self, shape: MiniCPMShape, vllm_config: VllmConfig, prefix: str, first_layer: int = 0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MiniCPMDecoderLayer(
                shape,
                vllm_config,
                f"{prefix}.layers.{index}",
                f"{prefix}.layers.{first_layer + index}.self_attn.attn",
            )
            for index in range(shape.layers)
        )
        self.norm = RMSNorm(shape.width, eps=shape.eps)

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """[n, width] -> [n, width] (final norm's)."""
        for layer in self.layers:
            stream = layer(positions, stream)
        return self.norm(stream)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load its own."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
