# SPDX-License-Identifier: Apache-2.0
"""Completing codec frames by a small transformer, over a batch of requests at once.

Such a model is fed the hidden state that a frame's first code was sampled from and the embedding of
that code, then code by code; each time it gives the logits of the next one. The layers are
transformers' own; what is ours is the loop (transformers' `generate` does it with host
synchronization in each step) and the drawing.
"""

from abc import ABC, abstractmethod

import torch
from transformers import Cache
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_omni.models.interfaces import FrameSampling


class DepthModel(ABC):
    """What the loop has to know of a model; a mix-in of its class."""

    @property
    @abstractmethod
    def drawn_groups(self) -> int:
        """Codes per frame that it draws: all but the first."""

    @property
    @abstractmethod
    def drawn_vocabulary(self) -> int:
        """Codes that it chooses from."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """For the keys and values of one frame."""

    @abstractmethod
    def advance(self, inputs: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Hidden states after further inputs.

        Args:
            inputs: [b, n, width]; n is 2 in a frame's first call, where attention is causal, and 1
                in the others.
            positions: int64 [1, n], of the inputs in the frame.
            cache: Holds what came before, and takes what comes now.

        Returns:
            [b, hidden_size], those of the last input.
        """

    @abstractmethod
    def code_logits(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """[b, hidden_size] -> [b, vocabulary]; `index` counts the drawn groups from 0."""

    @abstractmethod
    def code_embeds(self, index: int, codes: torch.Tensor) -> torch.Tensor:
        """Codes of a drawn group, int64 [b] -> [b, width], as they are fed."""

    def predict(
        self, hidden: torch.Tensor, first: torch.Tensor, sampling: FrameSampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw codes 1.. of each request's frame.

        Args:
            hidden: [b, width]; what the frame's first code was sampled from.
            first: [b, width]; the embedding of that code.
            sampling: How to draw.

        Returns:
            Codes int64 [b, groups - 1] and their embeddings [b, groups - 1, width].
        """
        groups = self.drawn_groups
        cache = self.new_cache()
        positions = torch.arange(groups + 1, device=hidden.device)[None]
        shape = (groups, self.drawn_vocabulary)
        noise = None if sampling.all_greedy else sampling.noise.exponential(*shape)
        inputs = torch.stack([hidden, first], dim=1)
        codes, embeds, fed = [], [], 0
        for index in range(groups):
            stop = fed + inputs.shape[1]
            last = self.advance(inputs, positions[:, fed:stop], cache)
            fed = stop
            logits = self.code_logits(index, last).float()
            code = draw(logits, sampling, None if noise is None else noise[:, index])
            inputs = self.code_embeds(index, code)[:, None]
            codes.append(code)
            embeds.append(inputs)
        return torch.stack(codes, dim=1), torch.cat(embeds, dim=1)


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
