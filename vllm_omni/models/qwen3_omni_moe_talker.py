# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni's talker as a vLLM model class.

Reference: transformers' `Qwen3OmniMoeTalkerForConditionalGeneration`. The backbone is vLLM's
Qwen3-MoE with a shared expert, the code predictor is transformers'.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE, SupportsQuant
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from vllm_omni.models.code_predictor import CodePredictor
from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.row_fed import RowFed
from vllm_omni.models.talker_parts import ResizeMLP, forbid_specials
from vllm_omni.models.weights import THINKER_EMBEDDING, copy_rows
from vllm_omni.pipelines.qwen3_omni_moe import CODEC_FLAG, RowKind


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": 0,
        "positions": -1,
        "intermediate_tensors": 0,
        "inputs_embeds": 0,
    }
)
class Qwen3OmniMoeTalkerModel(Qwen3MoeModel):
    """vLLM's backbone; only its compilation differs: positions are int64 [3, n] (M-RoPE)."""


class Qwen3OmniMoeTalker(RowFed, SupportsMRoPE, SupportsQuant):
    """The talker: `RowDriven`, with frames of `num_code_groups` codes.

    Its vLLM config is the checkpoint's talker config (`vllm_omni.models.hf_overrides`).
    """

    omni_capabilities: ClassVar[OmniCapabilities] = OmniCapabilities(
        row_driven=True, emits=("codes",)
    )
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "talker.codec_head.": "lm_head.",
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text = config.text_config
        quant_config = vllm_config.quant_config
        self.config = config
        self.input_width: int = text.hidden_size
        self.model = Qwen3OmniMoeTalkerModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.lm_head = ParallelLMHead(
            text.vocab_size,
            text.hidden_size,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        widths = (config.thinker_hidden_size, text.intermediate_size, text.hidden_size)
        self.text_projection = ResizeMLP(
            *widths, text.hidden_act, quant_config, maybe_prefix(prefix, "text_projection")
        )
        self.hidden_projection = ResizeMLP(
            *widths, text.hidden_act, quant_config, maybe_prefix(prefix, "hidden_projection")
        )
        self.code_predictor = CodePredictor(config.code_predictor_config)
        # The thinker's embeddings of the three special tokens, in the order of `RowKind`.
        self.register_buffer(
            "special_rows", torch.zeros(3, config.thinker_hidden_size), persistent=False
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings, int64 [n] -> [n, hidden_size]."""
        return self.model.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] (None off TP rank 0); special codes other than the end are -inf."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        return None if logits is None else forbid_specials(logits, self.config.codec_eos_token_id)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Text positions [3, n]; the AR engine replaces them by those of the request's rows."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def row_inputs(
        self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `RowDriven`; rows are `embeds` and `hidden`, [n, thinker_hidden_size]."""
        kind = (kinds & ~CODEC_FLAG & 0xFF).to(torch.int64)
        text = self.special_rows[kind.clamp_max(RowKind.TTS_EOS)]
        if "embeds" in rows:
            is_special = (kind <= RowKind.TTS_EOS)[:, None]
            text = torch.where(is_special, text, rows["embeds"].to(text))
        inputs = self.text_projection(text)
        if "hidden" in rows:
            media = self.hidden_projection(rows["hidden"].to(text))
            inputs = torch.where((kind == RowKind.MEDIA)[:, None], media, inputs)
        codec = self.model.embed_input_ids(token_ids.clamp_min(0))
        return inputs + codec * (kinds & CODEC_FLAG != 0)[:, None]

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; the projected `tts_pad`."""
        return self.text_projection(self.special_rows[RowKind.TTS_PAD][None])[0]

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; the frame part is the sum of the embeddings of all its codes."""
        first = self.model.embed_input_ids(token_ids)
        codes, embeds = self.code_predictor.predict(hidden, first, sampling)
        return Frames(
            codes=torch.cat([token_ids[:, None], codes], dim=1),
            inputs=torch.cat([first[:, None], embeds], dim=1).sum(dim=1),
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load `talker.*` and the three special rows of the thinker's embedding."""
        config = self.config
        ids = {
            RowKind.TTS_PAD: config.tts_pad_token_id,
            RowKind.TTS_BOS: config.tts_bos_token_id,
            RowKind.TTS_EOS: config.tts_eos_token_id,
        }
        weights = copy_rows(
            weights, THINKER_EMBEDDING, [ids[k] for k in sorted(ids)], self.special_rows
        )
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
