# SPDX-License-Identifier: Apache-2.0
"""Completing frames as one CUDA graph: a depth transformer, its sampling and all."""

import torch

from vllm_omni.models.interfaces import CompleteFrames, Frames, FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.platforms.graphs import Results, ShapeGraphs

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Requests in a step; others are padded to the next one."""


class FrameGraphs:
    """`CompleteFrames` by graphs.

    Args:
        frames: The model's.
    """

    def __init__(self, frames: CompleteFrames) -> None:
        self._frames = frames
        self._graphs = ShapeGraphs(self._flat, "completing frames")

    def capture(
        self,
        max_requests: int,
        width: int,
        memory: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Capture a graph for each number of requests.

        Args:
            max_requests: In a step.
            width: The hidden size.
            memory: The model's `frame_memory`.
            device: Of the model.
            dtype: Of the model.
        """
        sizes = [size for size in SIZES if size < max_requests] + [max_requests]
        self._graphs.capture(
            (
                torch.zeros(size, width, device=device, dtype=dtype),
                torch.zeros(size, device=device, dtype=torch.int64),
                torch.ones(size, device=device),
                torch.zeros(size, device=device, dtype=torch.int64),
                torch.ones(size, device=device),
                torch.zeros(size, device=device, dtype=torch.int64),
                torch.zeros(size, device=device, dtype=torch.int64),
                torch.zeros(size, memory, device=device, dtype=torch.int64),
                torch.ones(size, device=device),
            )
            for size in reversed(sizes)
        )

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `CompleteFrames`."""
        assert sampling.guidance is not None  # the engine's requests have it
        results = self._graphs(
            hidden,
            token_ids,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.noise.seeds,
            sampling.noise.positions,
            sampling.memory,
            sampling.guidance,
        )
        return Frames(*results)

    def _flat(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        memory: torch.Tensor,
        guidance: torch.Tensor,
    ) -> Results:
        """The frames of requests of which any may be greedy."""
        sampling = FrameSampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            noise=Noise(seeds, positions),
            all_greedy=False,
            memory=memory,
            guidance=guidance,
        )
        return tuple(self._frames(hidden, token_ids, sampling))
