# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v3 as a vLLM model class: Qwen3 with embeddings and heads for codes.

Reference: `sglang-omni` 0.1.3 (`models/higgs_tts`), and row A-60 for what may be drawn: a delayed
group says only that it begins; afterwards none does, and only the first group says the end. Forced
codes replace what was drawn; the others are drawn from logits without special codes, for all
requests of a step at once (`models/delay.py`), without waiting for the device.
"""

import torch
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import WeightsMapper

from vllm_omni.models.codec_lm import DelayCodecLM
from vllm_omni.models.delay import DelayPattern
from vllm_omni.models.qwen3_rows import Qwen3Rows


class HiggsAudioV3Talker(Qwen3Rows, DelayCodecLM, SupportsQuant):
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
        size = config.codebook_size
        delays = tuple(range(config.num_codebooks))
        pattern = DelayPattern(delays, begin=size - 2, end=size - 1, closing_row=False)
        super().__init__(pattern, end_token=size)
        self.config = config
        self.make_parts(vllm_config, prefix)
        if config.tie_codes:
            self.code_heads.weight = self.code_tables.weight

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the first group, [n, codebook_size + 1]; without begin, and without the id of the
        stream's end, which only `frames` says."""
        first = self.code_heads.weight[: self.config.codebook_size]
        logits = functional.linear(hidden_states, first)
        self.pattern.without_specials(logits, first=True)
        return functional.pad(logits, (0, 1), value=float("-inf"))

    def code_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`; no group begins anew, and only the first one says the end."""
        logits = self.code_heads(hidden).float().view(len(hidden), self.groups, -1)
        return self.pattern.without_specials(logits)

    def embed_row(self, codes: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`."""
        return self.code_tables.summed(codes)
