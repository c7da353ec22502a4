# SPDX-License-Identifier: Apache-2.0
"""VoxCPM2's two language models and its flow as one vLLM model class.

Reference: `VoxCPM2Model` of the authors' package. The second language model goes on from the
rounded hidden states of the first at every position, so both run in one forward. vLLM samples
whether a frame is the last one; the frame is drawn from both hidden states and from the frame
before it, and is what is fed next. So behind an embedding there are a flag that says whether a
position is a frame, and the frame itself, or zeros; it goes through the forward as it is.
"""

import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.latent_lm import LatentLM
from vllm_omni.models.local_transformers import Flow, LocalDiT, LocalEncoder
from vllm_omni.models.minicpm import MiniCPMDecoder
from vllm_omni.models.minicpm_shape import MiniCPMShape

FLOW_STEPS = 10
GUIDANCE = 2.0
"""Both as the package has them by default."""


class SemanticLM(MiniCPMDecoder):
    """The first language model, with the text's embeddings."""

    def __init__(self, shape: MiniCPMShape, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(shape, vllm_config, prefix)
        vocabulary = vllm_config.model_config.hf_config.lm_config["vocab_size"]
        self.embed_tokens = VocabParallelEmbedding(vocabulary, shape.width)


class Rounding(nn.Module):
    """Hidden states through a few numbers that are rounded.

    Args:
        width: Of hidden states.
        inner: Numbers in between.
        scale: Numbers are multiples of 1 / this.
    """

    def __init__(self, width: int, inner: int, scale: int) -> None:
        super().__init__()
        self._scale = scale
        self.in_proj = nn.Linear(width, inner)
        self.out_proj = nn.Linear(inner, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, width] -> the same."""
        inner = torch.tanh(self.in_proj(hidden))
        return self.out_proj(torch.round(inner * self._scale) / self._scale)


class VoxCPM2Talker(LatentLM, SupportsQuant):
    """See the module. Its vLLM config is the checkpoint's, see `hf_overrides`."""

    # The codec's, if they lie in the same folder as safetensors.
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"encoder.": None, "decoder.": None})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        lm, local, dit = config.lm_config, config.encoder_config, config.dit_config
        self.config = config
        self._patch, self._latent_size = config.patch_size, config.feat_dim
        shape = MiniCPMShape.of(lm, lm["num_hidden_layers"], no_rope=lm["no_rope"])
        residual = MiniCPMShape.of(
            lm, config.residual_lm_num_layers, no_rope=config.residual_lm_no_rope
        )
        self._width, self._frame = shape.width, self._patch * self._latent_size
        self.input_width = shape.width + 1 + self._frame
        self._text_scale = lm["scale_emb"] if lm["use_mup"] else 1.0
        self.base_lm = SemanticLM(shape, vllm_config, maybe_prefix(prefix, "base_lm"))
        self.residual_lm = MiniCPMDecoder(
            residual, vllm_config, maybe_prefix(prefix, "residual_lm"), first_layer=shape.layers
        )
        self.feat_encoder = LocalEncoder(_local(lm, local), self._patch, self._latent_size)
        self.feat_decoder = Flow(
            LocalDiT(_local(lm, dit), self._patch, self._latent_size),
            FLOW_STEPS,
            GUIDANCE,
            dit["dit_mean_mode"],
        )
        self.fsq_layer = Rounding(
            shape.width, config.scalar_quantization_latent_dim, config.scalar_quantization_scale
        )
        self.enc_to_lm_proj = nn.Linear(local["hidden_dim"], shape.width)
        self.lm_to_dit_proj = nn.Linear(shape.width, dit["hidden_dim"])
        self.res_to_dit_proj = nn.Linear(shape.width, dit["hidden_dim"])
        self.fusion_concat_proj = nn.Linear(2 * shape.width, shape.width)
        self.stop_proj = nn.Linear(shape.width, shape.width)
        self.stop_head = nn.Linear(shape.width, 2, bias=False)
        self.omni_capabilities = OmniCapabilities(
            row_driven=True, emits=("latents",), frame_hidden=2 * self._width + self._frame
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What a token looks like where only its place matters: nothing, int64 [n] ->
        [n, input_width]."""
        return self.pad_input().expand(len(input_ids), -1)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[n, width + 1 + frame] -> [n, 2 * width + frame]: hidden states of both language
        models, and the frame."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        inputs, flag, frame = inputs_embeds.split([self._width, 1, self._frame], dim=-1)
        inputs, is_frame = inputs.contiguous(), flag > 0.5
        semantic = self.base_lm(positions, inputs)
        semantic = torch.where(is_frame, self.fsq_layer(semantic), semantic)
        fused = self.fusion_concat_proj(torch.cat([semantic, inputs * is_frame], dim=-1))
        return torch.cat([semantic, self.residual_lm(positions, fused), frame], dim=-1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, 2]: the frame is followed by others, or is the last one."""
        semantic = hidden_states[:, : self._width]
        return self.stop_head(functional.silu(self.stop_proj(semantic)))

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LatentLM`."""
        embeddings = self.base_lm.embed_tokens(ids) * self._text_scale
        return functional.pad(embeddings, (0, 1 + self._frame))

    def embed_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """See `LatentLM`."""
        frames = vectors.view(-1, self._patch, self._latent_size)
        embeddings = self.enc_to_lm_proj(self.feat_encoder(frames))
        return torch.cat([functional.pad(embeddings, (0, 1), value=1.0), vectors], dim=-1)

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; every token has its frame."""
        semantic, residual, last = hidden.split([self._width, self._width, self._frame], dim=-1)
        conditions = [self.lm_to_dit_proj(semantic), self.res_to_dit_proj(residual)]
        noise = sampling.noise.normal(self._patch, self._latent_size).to(hidden.dtype)
        latents = self.feat_decoder(
            torch.cat(conditions, dim=-1), last.reshape(noise.shape), noise
        ).flatten(1)
        return Frames(codes=latents, inputs=self.embed_vectors(latents))

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`: what follows the prompt are the model's own frames."""
        return self.stop_head.weight.new_zeros(self.input_width)


def _local(lm: dict, local: dict) -> MiniCPMShape:
    """Of a transformer within a frame."""
    return MiniCPMShape.of(
        lm,
        local["num_layers"],
        no_rope=False,
        width=local["hidden_dim"],
        inner=local["ffn_dim"],
        heads=local["num_heads"],
        head_dim=local["kv_channels"],
    )
