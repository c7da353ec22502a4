# SPDX-License-Identifier: Apache-2.0
"""Completing frames as one CUDA graph: a depth transformer, its sampling and all."""

import torch
from vllm.ir import ops

from vllm_omni.models.interfaces import CompleteFrames, Frames, FrameSampling
from vllm_omni.models.noise import Noise
from vllm_omni.platforms.graphs import Results, ShapeGraphs, Tensors

FUSED = ["vllm_c", "native"]
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Requests in a step; others are padded to the next one."""


def with_fused_norms(frames: CompleteFrames) -> CompleteFrames:
    """The same with vLLM's fused kernels for normalization.

    Where vLLM compiles the backbone, it leaves normalization to the compiler, to whom a frame's
    layers are not shown: each of them would be nine kernels, more than half of all.
    """

    def complete(hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling) -> Frames:
        with ops.rms_norm.set_priority(FUSED), ops.fused_add_rms_norm.set_priority(FUSED):
            return frames(hidden, token_ids, sampling)

    return complete


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

        def example(size: int) -> Tensors:
            numbers = torch.zeros(size, device=device, dtype=torch.int64)
            ones = torch.ones(size, device=device)
            sampling = FrameSampling(
                temperature=ones,
                top_k=numbers,
                top_p=ones,
                noise=Noise(numbers, numbers),
                all_greedy=False,
                memory=numbers.new_zeros(size, memory),
                guidance=ones,
            )
            return torch.zeros(size, width, device=device, dtype=dtype), numbers, *_parts(sampling)

        self._graphs.capture(example(size) for size in reversed(sizes))

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `CompleteFrames`."""
        return Frames(*self._graphs(hidden, token_ids, *_parts(sampling)))

    def _flat(self, hidden: torch.Tensor, token_ids: torch.Tensor, *parts: torch.Tensor) -> Results:
        """The frames of requests of which any may be greedy."""
        return tuple(self._frames(hidden, token_ids, _sampling(parts)))


def _parts(sampling: FrameSampling) -> Tensors:
    """The tensors of sampling parameters, as `_sampling` takes them."""
    assert sampling.guidance is not None  # the engine's requests have it
    return (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.noise.seeds,
        sampling.noise.positions,
        sampling.memory,
        sampling.guidance,
    )


def _sampling(parts: Tensors) -> FrameSampling:
    temperature, top_k, top_p, seeds, positions, memory, guidance = parts
    return FrameSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        noise=Noise(seeds, positions),
        all_greedy=False,
        memory=memory,
        guidance=guidance,
    )
