# SPDX-License-Identifier: Apache-2.0
"""The small transformer that completes a codec frame, run over a batch of requests at once.

The layers are transformers' own; what is ours is the loop over codebooks (transformers' `generate`
does it, one request at a time and with host synchronization in each step) and the drawing.
"""

from copy import deepcopy

import torch
from transformers import DynamicCache, Qwen3OmniMoeTalkerCodePredictorConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_omni.models.interfaces import FrameSampling

# Without a mask, transformers' attention is causal over the first call's two positions, and over
# the cache for the single position of each later call.
_NO_MASK = {"full_attention": None}


class CodePredictor(Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration):
    """Qwen3-Omni's code predictor.

    Args:
        config: The talker config's `code_predictor_config`.
    """

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        config = deepcopy(config)
        # Inner modules take the config's dtype; vLLM says by the default dtype what it wants.
        config.dtype = torch.get_default_dtype()
        super().__init__(config)

    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """The talker's vectors [..., width] at this model's width: the same, here."""
        return inputs

    def predict(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw codes 1.. of each request's frame.

        Args:
            hidden: [b, width]; what the frame's first code was sampled from.
            first: [b, width]; the talker's embedding of that code.
            sampling: How to draw.

        Returns:
            Codes int64 [b, groups - 1] and their embeddings [b, groups - 1, width].
        """
        groups = len(self.lm_head)
        cache = DynamicCache(config=self.config)
        position_ids = torch.arange(groups + 1, device=hidden.device)[None]
        noise = None if sampling.all_greedy else self._noise(sampling, hidden)
        inputs = torch.stack([hidden, first], dim=1)
        codes, embeds, fed = [], [], 0
        for group in range(groups):
            stop = fed + inputs.shape[1]
            output = self.model(
                inputs_embeds=self.project(inputs),
                attention_mask=_NO_MASK,
                position_ids=position_ids[:, fed:stop],
                past_key_values=cache,
                use_cache=True,
            )
            fed = stop
            logits = self.lm_head[group](output.last_hidden_state[:, -1]).float()
            code = draw(logits, sampling, None if noise is None else noise[:, group])
            inputs = self.model.codec_embedding[group](code)[:, None]
            codes.append(code)
            embeds.append(inputs)
        return torch.stack(codes, dim=1), torch.cat(embeds, dim=1)

    def _noise(self, sampling: FrameSampling, hidden: torch.Tensor) -> torch.Tensor:
        """Exponential noise, float32 [b, groups - 1, vocabulary]; from a request's own generator
        where it has one, so its frames do not depend on what it is batched with."""
        noise = torch.empty(
            hidden.shape[0],
            len(self.lm_head),
            self.config.vocab_size,
            dtype=torch.float32,
            device=hidden.device,
        )
        if len(sampling.generators) < hidden.shape[0]:
            noise.exponential_()
        for index, generator in sampling.generators.items():
            noise[index].exponential_(generator=generator)
        return noise


def draw(logits: torch.Tensor, sampling: FrameSampling, noise: torch.Tensor | None) -> torch.Tensor:
    """One code per request: temperature, then top-k, then top-p, as transformers orders them.

    Args:
        logits: float32 [b, vocabulary].
        sampling: Parameters of the b requests.
        noise: float32 [b, vocabulary], exponential; None draws greedily.

    Returns:
        int64 [b].
    """
    greedy = logits.argmax(dim=-1)
    if noise is None:
        return greedy
    vocabulary = logits.shape[-1]
    is_greedy = sampling.temperature == 0
    top_k = torch.where(sampling.top_k == 0, vocabulary, sampling.top_k).clamp_max(vocabulary)
    warped = logits / torch.where(is_greedy, 1.0, sampling.temperature)[:, None]
    probs = apply_top_k_top_p(warped, top_k, sampling.top_p).softmax(dim=-1)
    # The arg-min of exponential(1) / p is distributed as p, and needs no host synchronization.
    drawn = (probs / noise).argmax(dim=-1)
    return torch.where(is_greedy, greedy, drawn)
