# SPDX-License-Identifier: Apache-2.0
"""CSM's backbone and depth decoder as a vLLM model class.

Reference: transformers' `CsmForConditionalGeneration`. The backbone is vLLM's Llama. A frame is fed
as the sum of the embeddings of its codes, each code out of a table of its group; the tables of all
groups are one, one after the other.
"""

import torch
from torch import nn
from transformers import CsmConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from vllm_omni.models.codec_lm import CodecLM
from vllm_omni.models.depth import DepthModel
from vllm_omni.models.depth_layers import DepthConfig, DepthTransformer
from vllm_omni.models.interfaces import Frames, FrameSampling
from vllm_omni.pipelines.csm import end_ids


class CsmDepthDecoder(DepthModel):
    """See `DepthModel`; inputs are as wide as the backbone.

    Args:
        config: The checkpoint's.
    """

    def __init__(self, config: CsmConfig) -> None:
        super().__init__()
        own = config.depth_decoder_config
        self.drawn_groups = own.num_codebooks - 1
        self.drawn_vocabulary = config.codec_config.codebook_size
        """What the codec knows."""
        self._vocabulary = own.vocab_size
        self.model = DepthTransformer(DepthConfig.of(own, own.num_codebooks, head_norm=False))
        self.model.inputs_embeds_projector = nn.Linear(
            own.backbone_hidden_size, own.hidden_size, bias=False
        )
        self.codebooks_head = nn.Module()
        self.codebooks_head.weight = nn.Parameter(
            torch.empty(self.drawn_groups, own.hidden_size, own.vocab_size)
        )

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.model.inputs_embeds_projector(inputs)

    def code_logits(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return hidden @ self.codebooks_head.weight[index, :, : self.drawn_vocabulary]

    def code_embeds(self, index: int, codes: torch.Tensor) -> torch.Tensor:
        """See `DepthModel`."""
        return self.model.embed_tokens(codes + (index + 1) * self._vocabulary)


class CsmTalker(CodecLM, SupportsQuant):
    """The backbone with its depth decoder. Its vLLM config is the checkpoint's whole config.

    Ids from the codec's codebook size on are never sampled. The last ones of the vocabulary mean,
    as sampled tokens, that a frame was the end (`vllm_omni.pipelines.csm.end_ids`).
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "codec_model.": None,
            # The one table of codes has either name, or both.
            "backbone_model.embed_tokens.embed_audio_tokens.": "model.embed_tokens.",
            "depth_decoder.model.embed_tokens.": "model.embed_tokens.",
            "backbone_model.": "model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: CsmConfig = vllm_config.model_config.hf_config
        self.config = config
        self.groups = config.num_codebooks
        self.input_width = config.hidden_size
        self.model = LlamaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.model.embed_tokens = nn.Embedding(
            config.num_codebooks * config.vocab_size, config.hidden_size
        )
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.embed_text_tokens = nn.Embedding(config.text_vocab_size, config.hidden_size)
        self.depth_decoder = CsmDepthDecoder(config)
        self.depth_decoder.model.embed_tokens = self.model.embed_tokens
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self._end, self._end_with_sound = end_ids(config)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] (None off TP rank 0); what the codec does not know is -inf."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is not None:
            logits[:, self.config.codec_config.codebook_size :] = float("-inf")
        return logits

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        return self.embed_text_tokens(ids)

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        return self.model.embed_tokens(codes + group * self.config.vocab_size)

    def complete(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CodecLM`."""
        return self.depth_decoder.predict(hidden, first, sampling)

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; a frame is the end if all of its codes but the last one say so."""
        frames = super().frames(hidden, token_ids, sampling)
        ends = frames.codes == self.config.codebook_eos_token_id
        tokens = token_ids.masked_fill(ends[:, :-1].all(dim=1), self._end_with_sound)
        return frames._replace(tokens=tokens.masked_fill(ends.all(dim=1), self._end))

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`: frames alone are fed after the prompt."""
        return self.embed_text_tokens.weight.new_zeros(self.input_width)
