# SPDX-License-Identifier: Apache-2.0
"""What a vLLM model class of ours promises to the AR engine beyond vLLM's own interfaces.

A row-driven model (a talker) is fed by two things that are summed at each position: the *row part*,
made from rows of an upstream stage, and the *frame part*, made from the codec frame that the model
itself produced at the previous step. The engine keeps both per request, batches the calls, and
knows nothing about the model; the model keeps no per-request state and knows nothing about
requests.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from vllm_omni.models.noise import Noise


@dataclass(frozen=True, slots=True)
class OmniCapabilities:
    """What a model class can do; declared, never discovered.

    Attributes:
        row_driven: It implements `RowDriven`.
        emits: Row tensors that it can emit.
        frame_memory: Integers per request that it notes with each frame, to have them with the
            next one (how far a delay pattern is, for example).
        frame_state: Likewise, numbers in the model's dtype (what the convolutions of a streaming
            codec look back on, for example).
        frame_hidden: Width of what frames are made of, where that is more than one hidden state; 0
            for the hidden size.
    """

    row_driven: bool = False
    emits: tuple[str, ...] = ()
    frame_memory: int = 0
    frame_state: int = 0
    frame_hidden: int = 0


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Sampling of the frame's further codes for a batch of b requests.

    Attributes:
        temperature: float32 [b]; 0 means greedy.
        top_k: int64 [b]; 0 means all.
        top_p: float32 [b].
        noise: Random numbers of the frame.
        all_greedy: Every temperature is 0 (known on the host, so no sync is needed).
        memory: int64 [b, `frame_memory`]; of each request's last frame, zeros before the first.
        state: [b, `frame_state`] in the model's dtype; likewise. Of the model's own making: it may
            write to it.
        guidance: float32 [b]; weight of classifier-free guidance inside of a frame, NaN for the
            model's own. None is that for all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    noise: Noise
    all_greedy: bool
    memory: torch.Tensor
    state: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    guidance: torch.Tensor | None = None


class Frames(NamedTuple):
    """One codec frame for each of b requests.

    Attributes:
        codes: What is emitted: int64 [b, groups], where column 0 is the sampled token unless the
            model replaced it; or, of frames that are no codes, floating [b, width].
        inputs: [b, input_width]; the frame part of each request's next position.
        tokens: int64 [b]; what counts as sampled, where that is not what was: an end that only the
            whole frame shows is one of the stage's stop tokens here. None for as sampled.
        memory: int64 [b, `frame_memory`], for the next frame; None where there is none.
        state: [b, `frame_state`]; likewise.
    """

    codes: torch.Tensor
    inputs: torch.Tensor
    tokens: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    state: torch.Tensor | None = None


class CompleteFrames(Protocol):
    """`RowDriven.frames`, or what does the same."""

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven.frames`."""


@runtime_checkable
class RowDriven(Protocol):
    """A vLLM model class whose inputs are rows of an upstream stage plus its own frames."""

    omni_capabilities: ClassVar[OmniCapabilities]
    input_width: int
    """Width of the row part and the frame part (not always the hidden size)."""

    @abstractmethod
    def row_inputs(
        self, rows: Mapping[str, torch.Tensor], kinds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """The row part of n positions: a whole prompt, or decode positions of many requests.

        Args:
            rows: Upstream row tensors, each [n, ...]; zeros where a position takes no row.
            kinds: uint8 [n], as the pipeline's edge chose them.
            token_ids: int64 [n]; the stage's own prompt ids; -1 for decode positions.

        Returns:
            [n, input_width] in the model's dtype.
        """

    @abstractmethod
    def pad_input(self) -> torch.Tensor:
        """The row part [input_width] of every position after the upstream has ended."""

    @abstractmethod
    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """Complete the frame that starts with each sampled token.

        Args:
            hidden: [b, hidden_size]; the final hidden state the token was sampled from.
            token_ids: int64 [b]; the sampled tokens (group 0), special ids included.
            sampling: How to draw the further groups.
        """

    @abstractmethod
    def combine(self, inputs: torch.Tensor) -> torch.Tensor:
        """Turn summed inputs [n, input_width] into `inputs_embeds` [n, hidden_size]."""
