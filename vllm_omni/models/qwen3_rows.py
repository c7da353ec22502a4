# SPDX-License-Identifier: Apache-2.0
"""What codec language models over Qwen3 have in common whose codes all have tables and heads of
their own."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import maybe_prefix

from vllm_omni.models.codec_lm import PromptFed
from vllm_omni.models.groups import GroupTables


class Qwen3Rows(PromptFed):
    """A mix-in; the vLLM config is that of the backbone, with `text_vocab_size`, `num_codebooks`
    and `codebook_size` (see `hf_overrides`).

    Attributes:
        model: The backbone; its embeddings are those of the text.
        code_tables: Embeddings of codes.
        code_heads: Their heads, one group after another.
    """

    model: Qwen3Model
    code_tables: GroupTables
    code_heads: nn.Linear

    def make_parts(self, vllm_config: VllmConfig, prefix: str) -> None:
        """To be called by the constructor, after that of `nn.Module`."""
        config = vllm_config.model_config.hf_config
        groups, size, width = config.num_codebooks, config.codebook_size, config.hidden_size
        self.input_width = width
        self.model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.model.embed_tokens = VocabParallelEmbedding(
            config.text_vocab_size, width, quant_config=vllm_config.quant_config
        )
        self.code_tables = GroupTables(groups, size, width)
        self.code_heads = nn.Linear(width, groups * size, bias=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return self.model.embed_tokens(ids)

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return self.code_tables.of(group, codes)

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; nothing: what follows the prompt is the model's own rows."""
        return self.code_tables.weight.new_zeros(self.input_width)
