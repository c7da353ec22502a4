# SPDX-License-Identifier: Apache-2.0
"""Higgs-Audio v2 as a vLLM model class: Llama with a feed-forward network of its own for sound.

Reference: transformers' `HiggsAudioV2ForConditionalGeneration`. Whether a position is sound is
known where its embedding is made, so a flag rides behind the embedding (`projection_dim` of the
stage's config is the width with it), and layers choose by it without waiting for the device. Both
networks run on all positions, and the unused result is dropped; but on a CPU, where looking costs
nothing, a step of one kind of position (decoding is all sound) runs one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaMLP, LlamaModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.config import try_get_generation_config

from vllm_omni.models.codec_lm import DelayCodecLM
from vllm_omni.models.delay import DelayPattern
from vllm_omni.models.groups import GroupTables
from vllm_omni.models.repetition import Repetition
from vllm_omni.pipelines.higgs_audio_v2 import delays, end_token

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kinds:
    """What the positions of a step are.

    Attributes:
        is_audio: Bool [n, 1]; the others are text.
        any_audio: Some may be sound.
        any_text: Some may be text.
    """

    is_audio: torch.Tensor
    any_audio: bool
    any_text: bool

    @classmethod
    def of(cls, is_audio: torch.Tensor) -> "Kinds":
        """Looks at them where that needs no synchronization."""
        if is_audio.is_cpu and not torch.compiler.is_compiling():
            return cls(is_audio, bool(is_audio.any()), not bool(is_audio.all()))
        return cls(is_audio, True, True)

    def choose(self, inputs: torch.Tensor, audio: Transform, text: Transform) -> torch.Tensor:
        """Each position [n, width] through the transform of its kind."""
        if not self.any_text:
            return audio(inputs)
        if not self.any_audio:
            return text(inputs)
        return torch.where(self.is_audio, audio(inputs), text(inputs))


class HiggsAudioV2DecoderLayer(LlamaDecoderLayer):
    """Attention is shared; norms and the feed-forward network are those of text or of sound."""

    def __init__(
        self, vllm_config: VllmConfig, prefix: str = "", config: PretrainedConfig | None = None
    ) -> None:
        super().__init__(vllm_config, prefix, config)
        config = config or vllm_config.model_config.hf_config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.audio_mlp = LlamaMLP(
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=vllm_config.quant_config,
            bias=config.mlp_bias,
            prefix=f"{prefix}.audio_mlp",
        )
        self.audio_input_layernorm = RMSNorm(width, eps=eps)
        self.audio_post_attention_layernorm = RMSNorm(width, eps=eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        kinds: Kinds,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's layer."""
        stream = hidden_states if residual is None else hidden_states + residual
        normed = kinds.choose(stream, self.audio_input_layernorm, self.input_layernorm)
        stream = stream + self.self_attn(positions=positions, hidden_states=normed)
        made = kinds.choose(stream, self._audio_network, self._text_network)
        return made, stream

    def _audio_network(self, stream: torch.Tensor) -> torch.Tensor:
        return self.audio_mlp(self.audio_post_attention_layernorm(stream))

    def _text_network(self, stream: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_attention_layernorm(stream))


class CodeEmbeddings(nn.Module):
    """The checkpoint's name for the tables of codes."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.embed_audio_tokens = GroupTables(
            config.num_codebooks, config.codebook_size, config.hidden_size
        )


class HiggsAudioV2Model(LlamaModel):
    """The backbone; its inputs have the flag as their last column."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(
            vllm_config=vllm_config, prefix=prefix, layer_type=HiggsAudioV2DecoderLayer
        )
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.text_vocab_size, config.hidden_size, quant_config=vllm_config.quant_config
        )
        self.embed_audio_tokens = CodeEmbeddings(config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[n, hidden_size + 1] -> [n, hidden_size] (final norm's)."""
        assert inputs_embeds is not None
        hidden, flag = inputs_embeds[:, :-1], inputs_embeds[:, -1:]
        return super().forward(
            None, positions, None, inputs_embeds=hidden.contiguous(), kinds=Kinds.of(flag > 0.5)
        )


class HiggsAudioV2Talker(DelayCodecLM, SupportsQuant):
    """The codec language model. Its vLLM config is the checkpoint's, see `hf_overrides`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"text_lm_head.": None, "audio_decoder_proj.": None}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        begin, end = config.audio_stream_bos_id, config.audio_stream_eos_id
        super().__init__(
            DelayPattern(delays(config), begin, end),
            end_token(config),
            _repetition(vllm_config.model_config, (begin, end)),
        )
        self.config = config
        self.input_width = config.hidden_size + 1
        self.model = HiggsAudioV2Model(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.audio_lm_head = nn.Linear(
            config.hidden_size, self.groups * config.codebook_size, bias=False
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the first group, [n, codebook_size + 1]; the end is -inf, only `frames` says it."""
        first = self.audio_lm_head.weight[: self.config.codebook_size]
        logits = functional.linear(hidden_states, first)
        return functional.pad(logits, (0, 1), value=float("-inf"))

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return _flagged(self.model.embed_tokens(ids), 0)

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`; a row's flag comes with its first group."""
        return _flagged(self._tables.of(group, codes), int(group == 0))

    def embed_row(self, codes: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`."""
        return _flagged(self._tables.summed(codes), 1)

    def code_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`."""
        return self.audio_lm_head(hidden).float().view(len(hidden), self.groups, -1)

    @property
    def _tables(self) -> GroupTables:
        return self.model.embed_audio_tokens.embed_audio_tokens

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; nothing: what follows the prompt is the model's own rows."""
        return self.audio_lm_head.weight.new_zeros(self.input_width)


def _repetition(config: ModelConfig, ignored: tuple[int, ...]) -> Repetition | None:
    """What the checkpoint's generation config says of it, which vLLM does not read."""
    found = try_get_generation_config(config.model, config.trust_remote_code, config.revision)
    settings = {} if found is None else found.to_dict()
    rows, most = settings.get("ras_win_len"), settings.get("ras_win_max_num_repeat")
    return Repetition(rows, most, ignored) if rows and most else None


def _flagged(embeddings: torch.Tensor, flag: int) -> torch.Tensor:
    """[n, hidden_size] -> [n, hidden_size + 1]."""
    return functional.pad(embeddings, (0, 1), value=float(flag))
