# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's talker as a vLLM model class.

Reference: transformers' `Qwen2_5OmniTalkerForConditionalGeneration`. The backbone is vLLM's Qwen2
with two differences: the head size is the config's own (not hidden size / heads), and embeddings
have the thinker's width.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsQuant
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.row_fed import RowFed
from vllm_omni.models.weights import THINKER_EMBEDDING, copy_rows
from vllm_omni.pipelines.qwen2_5_omni import CODEC_FLAG, RowKind
from vllm_omni.pipelines.speakers import speakers


class Qwen2_5OmniTalkerLayer(Qwen2DecoderLayer):
    """vLLM's Qwen2 layer around Llama's attention, which takes `config.head_dim`."""

    def __init__(
        self,
        config: PretrainedConfig,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            bias=True,
            bias_o_proj=False,
            cache_config=cache_config,
            prefix=f"{prefix}.self_attn",
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


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": 0,
        "positions": -1,
        "intermediate_tensors": 0,
        "inputs_embeds": 0,
    }
)
class Qwen2_5OmniTalkerModel(Qwen2Model):
    """vLLM's backbone with embeddings of `embedding_size`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(
            vllm_config=vllm_config, prefix=prefix, decoder_layer_type=Qwen2_5OmniTalkerLayer
        )
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.embedding_size,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.embed_tokens",
        )


class Qwen2_5OmniTalker(RowFed, SupportsMRoPE, SupportsQuant):
    """The talker: `RowDriven`, with frames of one code.

    Its vLLM config is the checkpoint's talker config (`vllm_omni.models.hf_overrides`).
    """

    omni_capabilities: ClassVar[OmniCapabilities] = OmniCapabilities(
        row_driven=True, emits=("codes",)
    )
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "token2wav.": None,
            "talker.codec_head.": "lm_head.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.config = config
        self.input_width: int = config.embedding_size
        self.model = Qwen2_5OmniTalkerModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.thinker_to_talker_proj = ReplicatedLinear(
            config.embedding_size,
            config.hidden_size,
            quant_config=quant_config,
            return_bias=False,
            prefix=maybe_prefix(prefix, "thinker_to_talker_proj"),
        )
        self._special_ids = [
            config.tts_text_pad_token_id,
            config.tts_text_end_token_id,
            *(each.bos_token for each in speakers(vllm_config.model_config.model).values()),
        ]
        # The thinker's embeddings of these tokens: `TEXT_PAD`, `TEXT_EOS`, then the speakers.
        self.register_buffer(
            "special_rows",
            torch.zeros(len(self._special_ids), config.embedding_size),
            persistent=False,
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings as the backbone takes them, int64 [n] -> [n, hidden_size]."""
        return self.combine(self.model.embed_input_ids(input_ids))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] (None off TP rank 0); the start code is -inf."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is not None:
            logits[:, self.config.tts_codec_start_token_id] = float("-inf")
        return logits

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Text positions [3, n]; the AR engine replaces them by those of the request's rows."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def row_inputs(
        self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `RowDriven`; rows are `embeds` and `hidden`, [n, embedding_size]."""
        kind = (kinds & ~CODEC_FLAG & 0xFF).to(torch.int64)
        is_speaker = kind >= RowKind.SPEAKER
        special = torch.where(is_speaker, kind - RowKind.SPEAKER + 2, kind.clamp_max(1))
        inputs = self.special_rows[special]
        if "hidden" in rows:
            takes_row = (kind == RowKind.REPLY) | (kind == RowKind.MEDIA)
            row = rows["hidden"].to(inputs)
            row = row + rows["embeds"].to(inputs) * (kind == RowKind.REPLY)[:, None]
            inputs = torch.where(takes_row[:, None], row, inputs)
        codec = self.model.embed_input_ids(token_ids.clamp_min(0))
        return inputs + codec * (kinds & CODEC_FLAG != 0)[:, None]

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; the thinker's embedding of the text pad token."""
        return self.special_rows[RowKind.TEXT_PAD]

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; a frame is the sampled code alone."""
        return Frames(codes=token_ids[:, None], inputs=self.model.embed_input_ids(token_ids))

    def combine(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `RowDriven`."""
        return self.thinker_to_talker_proj(inputs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load `talker.*` and the special rows of the thinker's embedding."""
        weights = copy_rows(weights, THINKER_EMBEDDING, self._special_ids, self.special_rows)
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
