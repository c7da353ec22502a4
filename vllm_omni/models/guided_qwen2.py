# SPDX-License-Identifier: Apache-2.0
"""Qwen2 that is run twice on what it is fed: with all that came before, and without the prompt.

Classifier-free guidance of an autoregressive model wants the hidden states of a second sequence,
which has the same inputs from some position on (where a *segment* begins), and nothing before it.
Rotary positions are relative, so the second one is the first with another mask. Both go through the
layers as one batch of twice the positions, and through one attention of twice the heads: keys and
values of both are in the request's own blocks, and vLLM schedules, caches and preempts them as one.

The mask is in the heads themselves, as kernels know none of this kind: heads are `MARKS` wider;
behind a key stands which segment it is of, behind a query, far below zero, which ones it is not of.
Within a segment that adds exactly 0 to a score, across segments what makes its weight exactly 0.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen2Config
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.qwen2 import Qwen2MLP, Qwen2Model
from vllm.sequence import IntermediateTensors

MARKS = 32
"""Segments that are told apart, the prompt being one; later ones are one. Attention kernels take
heads whose width is a multiple of it."""
_FAR = 16384.0
"""How far below the others a score is that does not count; any precision has this number."""


class GuidedAttention(nn.Module):
    """Qwen2's attention over two streams of the same requests.

    Args:
        config: Of the model.
        cache_config: vLLM's.
        quant_config: vLLM's.
        prefix: Of its weights.
    """

    def __init__(
        self,
        config: Qwen2Config,
        cache_config: CacheConfig | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.hidden_size // heads
        self._heads, self._kv_heads = heads // ranks, max(1, kv_heads // ranks)
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self._head_dim,
            heads,
            kv_heads,
            bias=True,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            heads * self._head_dim,
            config.hidden_size,
            bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(
            self._head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        self.attn = Attention(
            2 * self._heads,
            self._head_dim + MARKS,
            self._head_dim**-0.5,
            num_kv_heads=2 * self._kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, of_segment: torch.Tensor
    ) -> torch.Tensor:
        """Args:
        positions: int64 [2n].
        hidden: [2n, hidden_size], one stream after the other.
        of_segment: [n, MARKS], 1 for the segment that a position is of.
        """
        qkv, _ = self.qkv_proj(hidden)
        width, kv_width = self._heads * self._head_dim, self._kv_heads * self._head_dim
        query, key, value = qkv.split([width, kv_width, kv_width], dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        unmarked = torch.zeros_like(of_segment)
        made = self.attn(
            self._joined(query, torch.stack([unmarked, (of_segment - 1) * _FAR])),
            self._joined(key, torch.stack([unmarked, of_segment])),
            self._joined(value, torch.stack([unmarked, unmarked])),
        )
        made = made.view(len(of_segment), 2, self._heads, -1)[..., : self._head_dim]
        output, _ = self.o_proj(made.transpose(0, 1).reshape(len(hidden), width))
        return output

    def _joined(self, heads: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Heads [2n, h * head_dim] of both streams beside each other, each with the marks
        [2, n, MARKS] of its stream: [n, 2h * (head_dim + MARKS)]."""
        count = marks.shape[1]
        apart = heads.view(2, count, -1, self._head_dim)
        marks = marks[:, :, None].expand(-1, -1, apart.shape[2], -1)
        return torch.cat([apart, marks], dim=-1).transpose(0, 1).reshape(count, -1)


class GuidedDecoderLayer(nn.Module):
    """Qwen2's layer, with this attention."""

    def __init__(
        self,
        config: Qwen2Config,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.self_attn = GuidedAttention(
            config, cache_config, quant_config, prefix=f"{prefix}.self_attn"
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, stream: torch.Tensor, of_segment: torch.Tensor
    ) -> torch.Tensor:
        """[2n, hidden_size] -> the same; see `GuidedAttention`."""
        stream = stream + self.self_attn(positions, self.input_layernorm(stream), of_segment)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class GuidedQwen2Model(Qwen2Model):
    """The backbone. The last column of its inputs is the number of a position's segment; 0 is the
    prompt's. What it makes are both hidden states beside each other."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(
            vllm_config=vllm_config, prefix=prefix, decoder_layer_type=GuidedDecoderLayer
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[n, hidden_size + 1] -> [n, 2 * hidden_size] (final norm's): with the prompt, without."""
        assert inputs_embeds is not None
        inputs, segment = inputs_embeds[:, :-1], inputs_embeds[:, -1].long()
        marks = torch.arange(MARKS, device=segment.device)
        of_segment = (segment.clamp_max(MARKS - 1)[:, None] == marks).to(inputs.dtype)
        stream = inputs.repeat(2, 1)
        both = positions.repeat(2)
        for layer in self.layers:
            stream = layer(both, stream, of_segment)
        normed = self.norm(stream)
        return torch.cat(normed.chunk(2), dim=-1)


def with_segment(embeddings: torch.Tensor, segment: torch.Tensor | float) -> torch.Tensor:
    """Inputs of `GuidedQwen2Model`: [n, hidden_size] and, of each or of all, the segment."""
    widened = functional.pad(embeddings, (0, 1))
    widened[:, -1] = segment
    return widened
