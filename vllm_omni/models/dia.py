# SPDX-License-Identifier: Apache-2.0
"""Dia as a vLLM model class: an encoder of text, and a decoder that attends to it and to itself.

Reference: transformers' `DiaForConditionalGeneration`. vLLM's engine knows one sequence per
request, of which every position attends to all before it. Dia fits in exactly:

* Guidance takes a second stream through the decoder, which hears no text and says the same. Both
  are one sequence whose attention has twice the heads: each half is a stream's.
* What the text is encoded to stands before the speech, and its keys and values for cross-attention
  go where those of the speech for self-attention go. Which of them a query attends to, further
  numbers of the heads say: where a key is not meant, they take `FAR` off its score, after which
  its weight is zero, exactly.
* There are more heads of cross-attention than the cache has; so each text token has several
  positions (*lanes*), each with keys for its share of the heads. The cache holds nothing twice.

So requests are batched, preempted and continued as any others, and text costs attention only once.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers import DiaConfig, PretrainedConfig
from transformers.models.dia.modeling_dia import (
    DiaEncoder,
    DiaMLP,
    DiaMultiChannelEmbedding,
    DiaRMSNorm,
)
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.models.codec_lm import DelayCodecLM
from vllm_omni.models.delay import FREE, DelayPattern, DelayStep
from vllm_omni.models.dia_sizes import STREAMS, head_size, input_width
from vllm_omni.models.groups import draw_groups
from vllm_omni.models.interfaces import Frames, FrameSampling
from vllm_omni.pipelines.dia import end_token, lanes

FAR = 1e4
"""What a key that is not meant is moved off by; the exponential of it is zero in any precision."""
GUIDANCE = 3.0
"""Scale of guidance, unless a request says another. At 1 there is none."""
GUIDED_CODES = 45
"""Likewise, how many codes guidance leaves, where the request has no top-k (or is greedy)."""


class _Positions:
    """What the positions of a step are.

    Args:
        lane: [n, lanes]; one for the lane of a text position, zeros for speech.
    """

    def __init__(self, lane: torch.Tensor) -> None:
        self.lane = lane
        self.is_text = lane.sum(dim=-1) > 0.5
        text = lane.sum(dim=-1, keepdim=True)
        # By the kind of query: of self-attention, of cross-attention to each lane.
        self.distances = torch.cat([-FAR * text, -FAR * (1 - lane)], dim=-1)


class _Heads(nn.Module):
    """The attention of one decoder layer: projections as the checkpoint has them, and vLLM's
    attention twice over one cache."""

    def __init__(self, config: PretrainedConfig, cache: CacheConfig | None, prefix: str) -> None:
        super().__init__()
        self._config = config
        self._size = head_size(config)
        self._lanes = lanes(config)
        heads, kinds = config.num_attention_heads, 1 + self._lanes
        per_key = config.cross_num_attention_heads // config.cross_num_key_value_heads
        lane_of_head = torch.arange(config.cross_num_attention_heads) // per_key % self._lanes
        self.self_kind: torch.Tensor
        self.cross_kind: torch.Tensor
        self.register_buffer("self_kind", torch.eye(kinds)[[0] * heads], persistent=False)
        self.register_buffer("cross_kind", torch.eye(kinds)[1 + lane_of_head], persistent=False)
        own = f"{prefix}.self_attention.attn"
        keys = STREAMS * config.num_key_value_heads
        self.to_speech = Attention(
            STREAMS * heads,
            self._size,
            scale=1.0,
            num_kv_heads=keys,
            cache_config=cache,
            prefix=own,
        )
        self.to_text = Attention(
            STREAMS * config.cross_num_attention_heads,
            self._size,
            scale=1.0,
            num_kv_heads=keys,
            cache_config=cache,
            prefix=f"{prefix}.cross_attention.attn",
            kv_sharing_target_layer_name=own,
        )

    def keys(
        self,
        speech: torch.Tensor,
        text: torch.Tensor,
        positions: _Positions,
        distances: torch.Tensor | None,
    ) -> torch.Tensor:
        """Keys or values as they are cached, [n, streams, kv heads, size].

        Args:
            speech: Those of self-attention, [n, streams, kv heads, head_dim].
            text: Those of cross-attention, [n, streams, cross kv heads, head_dim].
            positions: What the positions are.
            distances: Of keys: what the further numbers are, [n, 1 + lanes].
        """
        by_lane = text.unflatten(2, (-1, self._lanes))
        own = (by_lane * positions.lane[:, None, None, :, None]).sum(dim=3)
        merged = torch.where(positions.is_text[:, None, None, None], own, speech)
        if distances is not None:
            further = distances[:, None, None].expand(*merged.shape[:3], -1)
            merged = torch.cat([merged, further.to(merged.dtype)], dim=-1)
        return self._widened(merged)

    def queries(self, query: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """[n, streams, heads, head_dim] and what it attends to [heads, kinds] -> [.., size]."""
        further = kind.expand(*query.shape[:2], -1, -1)
        return self._widened(torch.cat([query, further.to(query.dtype)], dim=-1))

    def made(self, attended: torch.Tensor) -> torch.Tensor:
        """What vLLM's attention gives -> [n, streams, heads * head_dim]."""
        shape = (STREAMS, -1, self._size)
        return attended.unflatten(-1, shape)[..., : self._config.head_dim].flatten(2)

    def _widened(self, heads: torch.Tensor) -> torch.Tensor:
        return functional.pad(heads, (0, self._size - heads.shape[-1]))


class _SelfProjections(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)


class _CrossProjections(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, keys = config.cross_num_attention_heads, config.cross_num_key_value_heads
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(config.cross_hidden_size, keys * size, bias=False)
        self.v_proj = nn.Linear(config.cross_hidden_size, keys * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)


class DiaDecoderLayer(nn.Module):
    """A layer over both streams."""

    def __init__(self, config: PretrainedConfig, cache: CacheConfig | None, prefix: str) -> None:
        super().__init__()
        self._head_dim = config.head_dim
        self.self_attention = _SelfProjections(config)
        self.cross_attention = _CrossProjections(config)
        self.heads = _Heads(config, cache, prefix)
        self.rotary = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        self.pre_sa_norm, self.pre_ca_norm, self.pre_mlp_norm = (
            DiaRMSNorm(config.hidden_size, eps=config.norm_eps) for _ in range(3)
        )
        self.mlp = DiaMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
        token_positions: torch.Tensor,
        positions: _Positions,
    ) -> torch.Tensor:
        """[n, streams, hidden_size] -> likewise; of text positions it means nothing.

        Args:
            hidden: Of the layer before.
            text: What text tokens are encoded to, [n, streams, encoder's hidden_size].
            token_positions: int64 [n].
            positions: What they are.
        """
        own, cross, heads = self.self_attention, self.cross_attention, self.heads
        normed = self.pre_sa_norm(hidden)
        query, key = self.rotary(
            token_positions, own.q_proj(normed).flatten(1), own.k_proj(normed).flatten(1)
        )
        distances = positions.distances
        keys = heads.keys(
            self._split(key.unflatten(1, (STREAMS, -1))),
            self._split(cross.k_proj(text)),
            positions,
            distances,
        )
        values = heads.keys(
            self._split(own.v_proj(normed)), self._split(cross.v_proj(text)), positions, None
        )
        queries = heads.queries(self._split(query.unflatten(1, (STREAMS, -1))), heads.self_kind)
        attended = heads.to_speech(queries.flatten(1), keys.flatten(1), values.flatten(1))
        hidden = hidden + own.o_proj(heads.made(attended))
        asked = self._split(cross.q_proj(self.pre_ca_norm(hidden)))
        queries = heads.queries(asked, heads.cross_kind)
        attended = heads.to_text(queries.flatten(1), keys.flatten(1), values.flatten(1))
        hidden = hidden + cross.o_proj(heads.made(attended))
        return hidden + self.mlp(self.pre_mlp_norm(hidden))

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        """[n, streams, heads * head_dim] -> [n, streams, heads, head_dim]."""
        return projected.unflatten(-1, (-1, self._head_dim))


class DiaDecoder(nn.Module):
    """The decoder, over rows of the delay pattern."""

    def __init__(self, config: PretrainedConfig, cache: CacheConfig | None, prefix: str) -> None:
        super().__init__()
        self.embeddings = DiaMultiChannelEmbedding(config)
        self.layers = nn.ModuleList(
            DiaDecoderLayer(config, cache, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.norm = DiaRMSNorm(config.hidden_size, eps=config.norm_eps)


class DiaDelayPattern(DelayPattern):
    """Dia's: a group ends once, and is padded after that; the row in which the last one ends is the
    last row.

    Args:
        config: The checkpoint's.
    """

    def __init__(self, config: DiaConfig) -> None:
        decoder = config.decoder_config
        super().__init__(
            tuple(config.delay_pattern), decoder.bos_token_id, int(decoder.eos_token_id)
        )
        self._pad = decoder.pad_token_id

    def forced(self, memory: torch.Tensor) -> torch.Tensor:
        """See `DelayPattern`."""
        rows, since_end = memory[:, :1], memory[:, 1:]
        begun = torch.where(self.delays > rows, self.begin, FREE)
        ended = torch.where(self.delays == since_end, self.end, self._pad)
        return torch.where((since_end > 0) & (self.delays <= since_end), ended, begun)

    def step(self, drawn: torch.Tensor, memory: torch.Tensor) -> DelayStep:
        """See `DelayPattern`."""
        step = super().step(drawn, memory)
        return step._replace(ended=memory[:, 1] >= self._last)


class DiaTalker(DelayCodecLM):
    """The decoder with the text's encoder. Its vLLM config is made by `hf_overrides`.

    All codes of a row are drawn here, with what the request says of temperature, top-k and top-p:
    guidance is a matter of both streams, and which code ends the speech one of the whole row. What
    vLLM samples is replaced.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.encoder.": "encoder.", "model.decoder.": "decoder."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: DiaConfig = vllm_config.model_config.hf_config.dia
        # Inner modules take the config's dtype; vLLM says by the default dtype what it wants.
        config.encoder_config.dtype = torch.get_default_dtype()
        super().__init__(DiaDelayPattern(config), end_token(config))
        self.config = config
        decoder = config.decoder_config
        self.input_width = input_width(config)
        self._size = decoder.vocab_size
        self._lanes = lanes(decoder)
        self.encoder = DiaEncoder(config.encoder_config)
        self.decoder = DiaDecoder(
            decoder, vllm_config.cache_config, maybe_prefix(prefix, "decoder")
        )
        self.logits_dense = nn.Linear(decoder.hidden_size, self.groups * self._size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """The decoder; positions are [n], the result is [n, streams * hidden_size]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        width = self.config.decoder_config.hidden_size
        frame, text, lane = inputs_embeds.tensor_split([width, -self._lanes], dim=1)
        text = text.unflatten(1, (STREAMS, -1))
        kinds = _Positions(lane)
        hidden = frame[:, None].expand(-1, STREAMS, -1)
        for layer in self.decoder.layers:
            hidden = layer(hidden, text, positions, kinds)
        return self.decoder.norm(hidden).flatten(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the first group without guidance, [n, codes + 1]; `frames` draws by itself."""
        heard = hidden_states[:, : self.config.decoder_config.hidden_size]
        logits = functional.linear(heard, self.logits_dense.weight[: self._size])
        return functional.pad(logits, (0, 1), value=float("-inf"))

    def code_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`; of both streams, float32 [b, streams, groups, codes]."""
        streams = hidden.unflatten(1, (STREAMS, -1))
        return self.logits_dense(streams).float().unflatten(-1, (self.groups, self._size))

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """What the text says, at its positions, int [n] (-1 elsewhere) -> [n, input_width].

        Each token stands in all of its lanes, one after the other.
        """
        at = (ids >= 0).nonzero()[:, 0]
        made = self.logits_dense.weight.new_zeros(len(ids), self.input_width)
        if not len(at):
            return made
        tokens = ids[at][:: self._lanes].long()
        heard = torch.stack([tokens, torch.zeros_like(tokens)])
        encoded = self.encoder(heard).last_hidden_state.transpose(0, 1).flatten(1)
        text = encoded.repeat_interleave(self._lanes, dim=0)
        lane = torch.eye(self._lanes, device=ids.device, dtype=text.dtype).repeat(len(tokens), 1)
        width = self.config.decoder_config.hidden_size
        made[at, width:] = torch.cat([text, lane], dim=1)
        return made

    def embed_codes(self, group: int, codes: torch.Tensor) -> torch.Tensor:
        """See `PromptFed`."""
        return self._widened(self.decoder.embeddings.embed(codes + group * self._size))

    def embed_row(self, codes: torch.Tensor) -> torch.Tensor:
        """See `DelayCodecLM`; -1 is no code."""
        offsets = self.decoder.embeddings.offsets
        embeddings = self.decoder.embeddings.embed(codes.clamp_min(0) + offsets)
        return self._widened((embeddings * (codes >= 0)[..., None]).sum(dim=-2))

    def row_inputs(
        self, rows: dict[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `RowDriven`."""
        return self.embed_text(rows["text"]) + self.embed_row(rows["codes"])

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`; nothing: what follows the prompt is the model's own rows."""
        return self.logits_dense.weight.new_zeros(self.input_width)

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`. Codes of groups whose turn has not come are the prompt's to feed."""
        drawn = draw_groups(self._allowed(self._guided(hidden, sampling)), sampling)
        memory = sampling.memory
        step = self.pattern.step(drawn, memory)
        own = torch.where(self.pattern.delays <= memory[:, :1], step.codes, FREE)
        return Frames(
            codes=step.codes,
            inputs=self.embed_row(own),
            tokens=torch.where(step.ended, end_token(self.config), step.codes[:, 0]),
            memory=step.memory,
        )

    def _guided(self, hidden: torch.Tensor, sampling: FrameSampling) -> torch.Tensor:
        """Logits of the stream that hears the text, of the codes that guidance leaves."""
        heard, unheard = self.code_logits(hidden).unbind(dim=1)
        scale = _scale(sampling.guidance, heard)
        guided = heard + (heard - unheard) * scale
        wanted = sampling.top_k
        most = torch.where(wanted > 0, wanted, GUIDED_CODES).clamp_max(self._size)
        ranked = guided.sort(dim=-1, descending=True).values
        least = ranked.gather(-1, (most - 1)[:, None, None].expand(-1, self.groups, 1))
        left = heard.masked_fill(guided < least, float("-inf"))
        return torch.where(scale == 1, heard, left)

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Only the first group may say the end, and then it does; nothing beyond it is said."""
        end = self.pattern.end
        logits[..., end + 1 :] = float("-inf")
        logits[:, 1:, end] = float("-inf")
        first = logits[:, 0]
        ends = (first.argmax(dim=-1) == end)[:, None]
        is_end = torch.arange(self._size, device=logits.device) == end
        logits[:, 0] = first.masked_fill(torch.where(ends, ~is_end, is_end), float("-inf"))
        return logits

    def _widened(self, frames: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, input_width]."""
        return functional.pad(frames, (0, self.input_width - frames.shape[-1]))


def _scale(guidance: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """[b, 1, 1]."""
    if guidance is None:
        return logits.new_full((len(logits), 1, 1), GUIDANCE)
    return torch.where(guidance.isnan(), GUIDANCE, guidance)[:, None, None]
