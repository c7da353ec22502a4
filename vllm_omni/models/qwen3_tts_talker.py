# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's talker as a vLLM model class.

Reference: the authors' package `qwen-tts` (`Qwen3TTSTalkerForConditionalGeneration`). The backbone
is vLLM's Qwen3: the talker's three position dimensions are always equal, which is plain RoPE.
"""

import torch
from torch import nn
from transformers import Qwen3OmniMoeTalkerCodePredictorConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.qwen3 import Qwen3Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from vllm_omni.models.code_predictor import CodePredictor
from vllm_omni.models.codec_lm import CodecLM
from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.talker_parts import ResizeMLP, forbid_specials


class Qwen3TTSCodePredictor(CodePredictor):
    """Qwen3-Omni's code predictor, fed at the talker's width through a projection.

    Args:
        config: The talker's `code_predictor_config`.
        width: The talker's hidden size.
    """

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, width: int) -> None:
        super().__init__(config, width)
        self.small_to_mtp_projection = (
            nn.Identity() if config.hidden_size == width else nn.Linear(width, config.hidden_size)
        )

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., hidden_size]."""
        return self.small_to_mtp_projection(inputs)


class Qwen3TTSTalker(CodecLM, SupportsQuant):
    """The talker. Its vLLM config is the checkpoint's talker config."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "speaker_encoder.": None,
            "talker.codec_head.": "lm_head.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.model.text_embedding.": "text_embedding.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.config = config
        self.groups = config.num_code_groups
        self.input_width = config.hidden_size
        self.model = Qwen3Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)
        width = config.text_hidden_size
        self.text_projection = ResizeMLP(
            width,
            width,
            config.hidden_size,
            config.hidden_act,
            quant_config,
            maybe_prefix(prefix, "text_projection"),
        )
        self.code_predictor = Qwen3TTSCodePredictor(
            config.code_predictor_config, config.hidden_size
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] (None off TP rank 0); special codes other than the end are -inf."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        return None if logits is None else forbid_specials(logits, self.config.codec_eos_token_id)

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        return self.text_projection(self.text_embedding(ids))

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        if group == 0:
            return self.model.embed_input_ids(codes)
        return self.code_predictor.model.codec_embedding[group - 1](codes)

    def complete(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CodecLM`."""
        return self.code_predictor.predict(hidden, first, sampling)

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; the projected `tts_pad`."""
        pad = torch.tensor([self.config.tts_pad_token_id], device=self.text_embedding.weight.device)
        return self.embed_text(pad)[0]
