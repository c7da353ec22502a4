# SPDX-License-Identifier: Apache-2.0
"""Per-request input state of a row-driven model, batched over requests.

Position p of a request is fed the sum of two vectors: the row part (from the upstream stage, known
when its row arrives) and the frame part (from the model's own frame, known when the token before it
was sampled). Both are kept until the request ends, so a preempted request is recomputed from what
was fed, not from what could be guessed. One implementation serves both of vLLM's model runners.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

from vllm_omni.ar.wire import FrameSampling as FrameSamplingParams
from vllm_omni.ar.wire import StageRequest
from vllm_omni.connectors.base import OmniConnector
from vllm_omni.inputs import RowInput
from vllm_omni.models.interfaces import Frames, FrameSampling, RowDriven

logger = init_logger(__name__)

_POSITIONS = "positions"


@dataclass(slots=True)
class _Request:
    """One request's inputs.

    Attributes:
        row_part: [capacity, width]; valid up to `filled`, then the pad row.
        frame_part: [capacity, width]; zeros where no frame belongs (the prompt).
        positions: int64 [3, prompt length] for M-RoPE, or None to count up.
        memory: int64 [`frame_memory`], of its last frame.
        lost: Rows of it were gone when they were to be read.
    """

    prompt_len: int
    sampling: FrameSamplingParams
    generator: torch.Generator | None
    row_part: torch.Tensor
    frame_part: torch.Tensor
    memory: torch.Tensor
    filled: int = 0
    positions: torch.Tensor | None = None
    lost: bool = False

    def reserve(self, capacity: int, pad: torch.Tensor) -> None:
        """Grow geometrically, so appending stays linear."""
        have = self.row_part.shape[0]
        if capacity <= have:
            return
        extra = max(capacity - have, have // 2, 64)
        width = pad.shape[0]
        self.row_part = torch.cat([self.row_part, pad.expand(extra, width)])
        self.frame_part = torch.cat([self.frame_part, self.frame_part.new_zeros(extra, width)])


@dataclass(frozen=True, slots=True)
class Slice:
    """Positions [start, start + count) of a request, in a batch."""

    request_id: str
    start: int
    count: int


class RowState:
    """Inputs of all live requests of a row-driven model.

    Args:
        model: The model class's pure functions.
        connector: Where upstream rows are read from.
        source: Name of the upstream stage.
        target: Name of this stage.
        device: Device of the model.
        dtype: Dtype of the model.
    """

    def __init__(
        self,
        model: RowDriven,
        connector: OmniConnector,
        source: str,
        target: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._connector = connector
        self._source = source
        self._target = target
        self._device = device
        self._pad = model.pad_input().to(device, dtype)
        width = model.omni_capabilities.frame_memory
        self._no_memory = torch.zeros(width, dtype=torch.int64, device=device)
        self._requests: dict[str, _Request] = {}

    def add(self, request_id: str, prompt_token_ids: Sequence[int], request: StageRequest) -> None:
        """Take a new request with its prompt's rows."""
        assert request.rows is not None
        width = self._pad.shape[0]
        generator = None
        if request.frames.seed is not None:
            generator = torch.Generator(self._device).manual_seed(request.frames.seed)
        state = _Request(
            prompt_len=len(prompt_token_ids),
            sampling=request.frames,
            generator=generator,
            row_part=self._pad.new_empty(0, width),
            frame_part=self._pad.new_empty(0, width),
            memory=self._no_memory,
        )
        self._requests[request_id] = state
        self._append(state, request.rows, prompt_token_ids)

    def append(self, request_id: str, updates: Iterable[RowInput]) -> None:
        """Take more positions for a running request."""
        state = self._requests[request_id]
        for rows in updates:
            self._append(state, rows, None)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._requests.pop(request_id, None)

    def lost(self, request_id: str) -> bool:
        """Whether rows of a request were gone, so that what it computes means nothing.

        Its memory is freed when it is released, and the abort may be here a step later.
        """
        return self._requests[request_id].lost

    def mrope_positions(self, request_id: str) -> tuple[torch.Tensor, int]:
        """M-RoPE positions int64 [3, prompt length] and the delta of the positions after it."""
        state = self._requests[request_id]
        if state.positions is None:
            return torch.arange(state.prompt_len).expand(3, -1), 0
        return state.positions, int(state.positions.max()) + 1 - state.prompt_len

    def inputs(self, batch: Sequence[Slice]) -> torch.Tensor:
        """`inputs_embeds` [sum of counts, hidden_size] of a step, in the batch's order."""
        row_parts, frame_parts = [], []
        for piece in batch:
            state = self._requests[piece.request_id]
            stop = piece.start + piece.count
            state.reserve(stop, self._pad)
            row_parts.append(state.row_part[piece.start : stop])
            frame_parts.append(state.frame_part[piece.start : stop])
        return self._model.combine(torch.cat(row_parts) + torch.cat(frame_parts))

    def sampled(
        self, batch: Sequence[Slice], hidden: torch.Tensor, token_ids: torch.Tensor
    ) -> Frames:
        """Complete the frames of a step's sampled tokens.

        Args:
            batch: One per sampled token; `start` is the position that the token will take.
            hidden: [b, hidden_size] that the tokens were sampled from.
            token_ids: int64 [b].

        Returns:
            Their codes, and what counts as sampled.
        """
        states = [self._requests[piece.request_id] for piece in batch]
        frames: Frames = self._model.frames(hidden, token_ids, self._sampling(states))
        for piece, state, inputs in zip(batch, states, frames.inputs, strict=True):
            state.reserve(piece.start + 1, self._pad)
            state.frame_part[piece.start] = inputs
        if frames.memory is not None:
            for state, memory in zip(states, frames.memory, strict=True):
                state.memory = memory
        return frames

    def _sampling(self, states: Sequence[_Request]) -> FrameSampling:
        params = [state.sampling for state in states]
        return FrameSampling(
            temperature=torch.tensor([p.temperature for p in params], device=self._device),
            top_k=torch.tensor([p.top_k for p in params], device=self._device),
            top_p=torch.tensor([p.top_p for p in params], device=self._device),
            generators={i: s.generator for i, s in enumerate(states) if s.generator is not None},
            all_greedy=all(p.temperature == 0 for p in params),
            memory=torch.stack([state.memory for state in states]),
        )

    def _append(
        self, state: _Request, rows: RowInput, prompt_token_ids: Sequence[int] | None
    ) -> None:
        count = len(rows.index)
        try:
            upstream = self._read(rows)
        except KeyError:
            logger.debug("Rows are gone; their request is being aborted")
            state.lost = True
        if state.lost:
            state.reserve(state.filled + count, self._pad)
            state.filled += count
            return
        if count == 0:
            return
        index = torch.tensor(rows.index)
        # What a message appends beyond the prompt are decode positions: they have no id yet.
        token_ids = torch.full((count,), -1)
        if prompt_token_ids is not None:
            token_ids[: state.prompt_len] = torch.tensor(prompt_token_ids)
            if _POSITIONS in upstream:
                state.positions = _rebase_positions(
                    upstream[_POSITIONS], rows.index[: state.prompt_len]
                )
        kinds = torch.frombuffer(bytearray(rows.kinds), dtype=torch.uint8)
        row_part = self._model.row_inputs(
            {
                name: self._on_device(_gather(tensor, index))
                for name, tensor in upstream.items()
                if name != _POSITIONS
            },
            kinds.to(self._device),
            token_ids.to(self._device),
        )
        state.reserve(state.filled + count, self._pad)
        state.row_part[state.filled : state.filled + count] = row_part
        state.filled += count

    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the model takes them: floats in its dtype, ids as they are."""
        return rows.to(self._device, self._pad.dtype if rows.is_floating_point() else None)

    def _read(self, rows: RowInput) -> dict[str, torch.Tensor]:
        """The message's upstream rows, each name's spans joined; names that only some spans have
        (positions come with prompts only) are cut to the spans that have them."""
        parts: dict[str, list[torch.Tensor]] = {}
        for span in rows.spans:
            payload = self._connector.get(self._source, self._target, span.handle.key, span.handle)
            for name, tensor in payload.items():
                parts.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _gather(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`rows[index]`, with zeros where the index is -1 or past the rows (which only some have)."""
    gathered = rows[index.clamp(0, len(rows) - 1)]
    gathered[(index < 0) | (index >= len(rows))] = 0
    return gathered


def _rebase_positions(upstream: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """M-RoPE positions of a prompt that is a selection of upstream rows.

    Positions are compositional: text counts up by one, a picture or sound has a shape of its own
    that begins where the text before it ended. A run of consecutive upstream rows thus keeps its
    shape and moves as a whole; positions without an upstream row count up like text.

    Args:
        upstream: int [n, 3], positions of the upstream prompt (later rows count up).
        index: Upstream row of each position of this prompt, -1 for none.

    Returns:
        int64 [3, len(index)].
    """
    known = upstream.shape[0]
    before = torch.cat([upstream.new_full((1,), -1), upstream.max(dim=1).values.cummax(0).values])
    rows = torch.tensor(index)
    rows[rows >= known] = -1
    positions = torch.empty(3, len(index), dtype=torch.int64)
    following, start = 0, 0
    for stop in _run_ends(rows):
        if rows[start] < 0:
            positions[:, start:stop] = torch.arange(following, following + stop - start)
        else:
            shift = following - int(before[rows[start]]) - 1
            positions[:, start:stop] = upstream[rows[start:stop]].T + shift
        following = max(following, int(positions[:, start:stop].max()) + 1)
        start = stop
    return positions


def _run_ends(rows: torch.Tensor) -> list[int]:
    """Ends of the runs that `rows` consists of: consecutive rows, or all -1."""
    step = rows[1:] - rows[:-1]
    none = rows < 0
    breaks = torch.where(none[1:], ~none[:-1], step != 1) | (none[:-1] & ~none[1:])
    return [int(end) + 1 for end in breaks.nonzero()[:, 0]] + [len(rows)]
