# SPDX-License-Identifier: Apache-2.0
"""Completing codec frames by a small transformer, over a batch of requests at once.

Such a model is fed the hidden state that a frame's first code was sampled from and the embedding of
that code, then code by code; each time it gives the logits of the next one. (transformers'
`generate` does it with host synchronization in each step.)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_omni.models.depth_layers import DepthTransformer
from vllm_omni.models.interfaces import FrameSampling


class DepthModel(nn.Module, ABC):
    """Completes frames; a model says how codes are embedded and chosen.

    Attributes:
        model: The decoder.
        drawn_groups: Codes per frame that it draws: all but the first.
        drawn_vocabulary: Codes that it chooses from.
    """

    model: DepthTransformer
    drawn_groups: int
    drawn_vocabulary: int

    @abstractmethod
    def project(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs [b, n, input width] at the decoder's width, as a tensor of their own."""

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
        groups, vocabulary = self.drawn_groups, self.drawn_vocabulary
        frames = self.model.new_frames(len(hidden))
        warp = luck = None
        if not sampling.all_greedy:
            warp = Warp.of(sampling, vocabulary)
            luck = warp.luck(sampling.noise.exponential(groups, vocabulary))
        inputs = torch.stack([hidden, first], dim=1)
        codes, embeds, fed = [], [], 0
        for index in range(groups):
            last = self.model(self.project(inputs), fed, frames)
            fed += inputs.shape[1]
            scores = self.code_logits(index, last).float()
            if warp is not None and luck is not None:
                scores = warp.warped(scores) + luck[:, index]
            code = scores.argmax(dim=-1)
            inputs = self.code_embeds(index, code)[:, None]
            codes.append(code)
            embeds.append(inputs)
        return torch.stack(codes, dim=1), torch.cat(embeds, dim=1)


@dataclass(frozen=True, slots=True)
class Warp:
    """Temperature, then top-k, then top-p, as transformers orders them; nothing for the greedy.

    Attributes:
        temperature: float32 [b, 1]; 1 for greedy requests.
        top_k: int64 [b].
        top_p: float32 [b].
        lucky: float32 [b, 1]; 0 for greedy requests, 1 for the others.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    lucky: torch.Tensor

    @classmethod
    def of(cls, sampling: FrameSampling, vocabulary: int) -> Self:
        """For logits over a vocabulary."""
        greedy = sampling.temperature == 0
        return cls(
            torch.where(greedy, 1.0, sampling.temperature)[:, None],
            torch.where(sampling.top_k == 0, vocabulary, sampling.top_k).clamp_max(vocabulary),
            sampling.top_p,
            (~greedy).float()[:, None],
        )

    def warped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [b, vocabulary], with what may not be drawn at -inf."""
        return apply_top_k_top_p(logits / self.temperature, self.top_k, self.top_p)

    def luck(self, noise: torch.Tensor) -> torch.Tensor:
        """What is added to warped logits, so that their largest is a draw (Gumbel's trick).

        Args:
            noise: float32 [b, ..., vocabulary], exponential.
        """
        return noise.log().mul_(self.lucky.view(-1, *[1] * (noise.ndim - 1))).neg_()


def draw(logits: torch.Tensor, sampling: FrameSampling, noise: torch.Tensor | None) -> torch.Tensor:
    """One code per request, without waiting for the device.

    Args:
        logits: float32 [b, vocabulary].
        sampling: Parameters of the b requests.
        noise: float32 [b, vocabulary], exponential; None draws greedily.

    Returns:
        int64 [b].
    """
    if noise is None:
        return logits.argmax(dim=-1)
    warp = Warp.of(sampling, logits.shape[-1])
    return (warp.warped(logits) + warp.luck(noise)).argmax(dim=-1)
