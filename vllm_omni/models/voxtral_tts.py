# SPDX-License-Identifier: Apache-2.0
"""Voxtral TTS's backbone and acoustic transformer as a vLLM model class.

The backbone is vLLM's Llama, from weights in Mistral's layout. It samples the first code of a
frame, whose head belongs to the acoustic transformer; that makes the others out of noise
(`voxtral_acoustic`). A frame is fed as the sum of the embeddings of its codes, each out of the part
of one table that is its group's.
"""

import itertools
from collections.abc import Iterable, Iterator

import regex as re
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix

from vllm_omni.config.hf.voxtral_tts import EMPTY, SPECIAL_CODES, VoxtralTTSConfig, padded
from vllm_omni.models.codec_lm import CodecLM
from vllm_omni.models.interfaces import FrameSampling
from vllm_omni.models.voxtral_acoustic import AcousticTransformer

_LAYER_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""Mistral's names of a layer's parts, and vLLM's."""
_ROTATED = re.compile(r"^layers\.\d+\.attention\.w[qk]\.weight$")


class VoxtralTTSTalker(CodecLM, SupportsQuant):
    """The backbone with its acoustic transformer. Its vLLM config is a `VoxtralTTSConfig`, see
    `hf_overrides`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={
            re.compile(rf"^layers\.(\d+)\.{re.escape(own)}\."): rf"model.layers.\1.{name}."
            for own, name in _LAYER_PARTS.items()
        },
        orig_to_new_prefix={
            "audio_tokenizer.": None,
            "acoustic_transformer.time_embedding.": None,
            "mm_audio_embeddings.tok_embeddings.": "text_embeddings.",
            "mm_audio_embeddings.audio_codebook_embeddings.embeddings.": "model.embed_tokens.",
            "norm.": "model.norm.",
            # Text is never written.
            "output.": None,
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: VoxtralTTSConfig = vllm_config.model_config.hf_config
        self.config = config
        self.groups = config.groups
        self.input_width = config.hidden_size
        self.model = LlamaModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        sizes = config.code_sizes
        self.model.embed_tokens = nn.Embedding(padded(sum(sizes)), config.hidden_size)
        self.text_embeddings = nn.Embedding(config.text_vocab_size, config.hidden_size)
        self.acoustic_transformer = AcousticTransformer(
            config.acoustic_config, sizes[0], config.acoustic_codebook_size, self.groups - 1
        )
        self._starts = [0, *itertools.accumulate(sizes)][: self.groups]
        self.starts: torch.Tensor
        self.register_buffer("starts", torch.tensor(self._starts[1:]), persistent=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of first codes, float32 [n, codes]; that there is no sound is never said."""
        head = self.acoustic_transformer.semantic_codebook_output
        logits = head(hidden_states)[:, : self.config.code_sizes[0]].float()
        logits[:, EMPTY] = float("-inf")
        return logits

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        return self.text_embeddings(ids)

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `CodecLM`."""
        return self.model.embed_tokens(codes + self._starts[group])

    def complete(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CodecLM`. Greedy or not, the flow starts from noise."""
        noise = sampling.noise.normal(self.groups - 1)
        codes = self.acoustic_transformer.codes(hidden, noise, sampling.guidance) + SPECIAL_CODES
        return codes, self.model.embed_tokens(codes + self.starts)

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`: frames alone are fed after the prompt."""
        return self.text_embeddings.weight.new_zeros(self.input_width)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what belongs to this stage, out of Mistral's layout."""
        return super().load_weights(self._halved(weights))

    def _halved(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Mistral rotates neighbouring numbers of queries and keys, vLLM's Llama those that are
        half a head apart: their rows are put where these are."""
        for name, weight in weights:
            if _ROTATED.match(name):
                heads = weight.unflatten(0, (-1, self.config.head_dim // 2, 2))
                weight = heads.transpose(1, 2).reshape_as(weight)
            yield name, weight
