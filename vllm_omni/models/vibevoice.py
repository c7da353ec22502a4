# SPDX-License-Identifier: Apache-2.0
"""VibeVoice's language model, diffusion head and streamed sound as a vLLM model class.

Reference: transformers' `VibeVoiceForConditionalGeneration`. vLLM samples one of four tokens: a
frame follows, sound begins, sound ends, all is said. A frame is denoised from the hidden states of
its step, with the prompt and without (see `guided_qwen2`); what is fed next is the frame and what
it sounds like, so sound is made here, and emitted.
"""

import torch
from torch import nn
from transformers import VibeVoiceConfig
from transformers.models.vibevoice.modeling_vibevoice import (
    VibeVoiceDiffusionHead,
    VibeVoiceMultiModalProjector,
)
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.transformers_utils.config import try_get_generation_config

from vllm_omni.models.denoising import GuidedDenoising
from vllm_omni.models.guided_qwen2 import GuidedQwen2Model, with_segment
from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.latent_lm import LatentLM
from vllm_omni.models.vibevoice_sound import StreamedSound
from vllm_omni.pipelines.vibevoice import sampled_ids

FIRST_SEGMENT = 1
"""Of the speech; 0 is the prompt."""


class VibeVoiceTalker(LatentLM, SupportsQuant):
    """See the module. Its vLLM config is the checkpoint's, see `hf_overrides`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "model.audio_tower.encoder.": None,
            "model.audio_tower.decoder.": "sound.decoder.",
            "model.semantic_tokenizer_encoder.": "sound.semantic_encoder.",
            "model.multi_modal_projector.": "acoustic_connector.",
            "model.semantic_connector.": "semantic_connector.",
            "model.diffusion_head.": "diffusion_head.",
            "model.latent_scaling_factor": "latent_scaling_factor",
            "model.latent_bias_factor": "latent_bias_factor",
            "model.language_model.": "model.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: VibeVoiceConfig = vllm_config.model_config.hf_config
        text, acoustic, semantic = (
            config.text_config,
            config.audio_config,
            config.semantic_model_config,
        )
        self.config = config
        self.input_width = text.hidden_size + 1
        self.model = GuidedQwen2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            text.vocab_size,
            text.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if text.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.acoustic_connector = VibeVoiceMultiModalProjector(
            acoustic.hidden_size, text.hidden_size
        )
        self.semantic_connector = VibeVoiceMultiModalProjector(
            semantic.hidden_size, text.hidden_size
        )
        self.diffusion_head = VibeVoiceDiffusionHead(config.diffusion_head_config)
        self.sound = StreamedSound(config)
        self.latent_scaling_factor = nn.Parameter(torch.tensor(1.0))
        self.latent_bias_factor = nn.Parameter(torch.tensor(0.0))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self.omni_capabilities = OmniCapabilities(
            row_driven=True,
            emits=("sound",),
            frame_memory=1,
            frame_state=self.sound.state_size,
            frame_hidden=2 * text.hidden_size,
        )
        found = try_get_generation_config(
            vllm_config.model_config.model,
            vllm_config.model_config.trust_remote_code,
            vllm_config.model_config.revision,
        )
        self._denoised = GuidedDenoising({} if found is None else found.to_dict())
        self._sampled = torch.tensor(sampled_ids(config))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [n] -> [n, input_width]."""
        return with_segment(self.model.embed_tokens(input_ids), FIRST_SEGMENT)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, vocab_size] (None off TP rank 0); all but the four tokens are -inf."""
        # Contiguous, as vLLM's kernels for CPUs take it to be.
        with_prompt = hidden_states.chunk(2, dim=-1)[0].contiguous()
        logits = self.logits_processor(self.lm_head, with_prompt)
        if logits is None:
            return None
        sampled = self._sampled.to(logits.device)
        kept = logits.new_full(logits.shape, float("-inf"))
        return kept.index_copy_(1, sampled, logits[:, sampled])

    def embed_text(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LatentLM`; ids of a whole prompt, whose last position speech begins at."""
        begins = (ids == self.config.audio_bos_token_id).cumsum(0)
        segment = (begins == begins[-1]) & (begins > 0)
        return with_segment(self.model.embed_tokens(ids), segment * FIRST_SEGMENT)

    def embed_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """See `LatentLM`; latents of recordings are part of the prompt."""
        scaled = (vectors + self.latent_bias_factor) * self.latent_scaling_factor
        return with_segment(self.acoustic_connector(scaled), 0)

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`. What is emitted are samples behind a 1, or anything behind a 0 for a
        token that is no frame."""
        with_prompt, without = hidden.chunk(2, dim=-1)
        noise = sampling.noise.normal(self.config.audio_config.hidden_size).to(hidden.dtype)
        latents = self._denoised(self.diffusion_head, with_prompt, without, noise)
        samples, heard, state = self.sound(
            latents / self.latent_scaling_factor - self.latent_bias_factor, sampling.state
        )
        fed = self.acoustic_connector(latents) + self.semantic_connector(heard)
        is_frame = (token_ids == self.config.audio_token_id)[:, None]
        begun = sampling.memory + (token_ids == self.config.audio_bos_token_id)[:, None]
        inputs = torch.where(is_frame, fed, self.model.embed_tokens(token_ids))
        return Frames(
            codes=torch.cat([is_frame.to(samples.dtype), samples], dim=1),
            inputs=with_segment(inputs, begun[:, 0] + FIRST_SEGMENT),
            memory=begun,
            state=torch.where(is_frame, state, sampling.state),
        )

    def pad_input(self) -> torch.Tensor:
        """See `RowDriven`: what follows the prompt is the model's own."""
        return self.latent_scaling_factor.new_zeros(self.input_width)
