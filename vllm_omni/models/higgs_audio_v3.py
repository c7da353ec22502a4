# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3 as a vLLM model class: Qwen3 with embeddings and heads for codes.

Reference: `sglang-omni` 0.1.3 (`models/higgs_tts`), and row A-60 for what may be drawn: a delayed
group says only that it begins; afterwards none does, and only the first group says the end. Forced
codes replace what was drawn; the others are drawn from logits without special codes, for all
requests of a step at once (`models/delay.py`), without waiting for the device.
"""

import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.models.codec_lm import DelayCodecLM
from vllm_omni.models.delay import DelayPattern
from vllm_omni.models.groups import GroupTables


class HiggsAudioV3Talker(DelayCodecLM, SupportsQuant):
    """The codec language model. Its vLLM config is the checkpoint's `text_config`, see
    `hf_overrides`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "body.": "model.",
            "tied.embedding.text_embedding.": "model.embed_tokens.",
            "tied.embedding.modality_embeddings.0.embedding.": "code_tables.",
            "tied.embedding.modality_embeddings.0.model.": None,  # the codec
            "tied.head.modality_heads.0.": "code_heads.",
            "tied.head.text_head.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        groups, size, width = config.num_codebooks, config.codebook_size, config.hidden_size
        begin, end = size - 2, size - 1
        pattern = DelayPattern(tuple(range(groups)), begin, end, closing_row=False)
        super().__init__(pattern, end_token=size)
        self.config = config
        self.input_width = width
        self.model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.model.embed_tokens = VocabParallelEmbedding(
            config.text_vocab_size, width, quant_config=vllm_config.quant_config
        )
        self.code_tables = GroupTables(groups, size, width)
        self.code_heads = nn.Linear(width, groups * size, bias=False)
        if config.tie_codes:
            self.code_heads.weight = self.code_tables.weight
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codes of the first group, int64 [n] -> [n, hidden_size]."""
        return self.embed_codes(0, input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """The backbone; positions are [n], the result is [n, hidden_size] (final norm's)."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(None, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the first group, [n, codebook_size + 1]; without begin, and without the id of the
        stream's end, which only `frames` says."""
        logits = functional.linear(
            hidden_states, self.code_heads.weight[: self.config.codebook_size]
        )
        self.pattern.without_specials(logits, first=True)
        return functional.pad(logits, (0, 1), value=float("-inf"))

    def code_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`; no group begins anew, and only the first one says the end."""
        logits = self.code_heads(hidden).float().view(len(hidden), self.groups, -1)
        return self.pattern.without_specials(logits)

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return self.model.embed_tokens(ids)

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return self.code_tables.of(group, codes)

    def embed_row(self, codes: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`."""
        return self.code_tables.summed(codes)

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; nothing: what follows the prompt is the model's own rows."""
        return self.code_tables.weight.new_zeros(self.input_width)
