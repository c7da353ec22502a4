# SPDX-License-Identifier: Apache-2.0
"""Input state of a row-driven model, on the device and batched over requests.

Position p of a request is fed the sum of two vectors: the row part (from the upstream stage, known
when its row arrives) and the frame part (from the model's own frame, known when the token before it
was sampled). Both are kept until the request ends, so a preempted request is recomputed from what
was fed, not from what could be guessed.

A step reads all of its inputs by one index and writes all of its frames by one; nothing in it waits
for the device. One implementation serves both of vLLM's model runners.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_omni.ar import wire
from vllm_omni.ar.row_pages import RowPages
from vllm_omni.ar.row_reading import POSITIONS, RowReader, layout, rebase_positions, selected
from vllm_omni.inputs import RowInput
from vllm_omni.models.interfaces import (
    CompleteFrames,
    Frames,
    FrameSampling,
    OmniCapabilities,
    RowDriven,
)
from vllm_omni.models.noise import Noise
from vllm_omni.platforms import to_device

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """Which positions a step computes: of each request, `counts` from `starts` on.

    Attributes:
        request_ids: b of them, in the runner's order.
        starts: int64 [b].
        counts: int64 [b].
    """

    request_ids: Sequence[str]
    starts: np.ndarray
    counts: np.ndarray

    def of(self, kept: np.ndarray) -> "Step":
        """The same of some of its requests, int [k]."""
        ids = [self.request_ids[i] for i in kept]
        return Step(ids, self.starts[kept], self.counts[kept])


@dataclass(slots=True)
class _Request:
    """What the host knows of a request.

    Attributes:
        slot: Of the tensors.
        greedy: It draws nothing at random.
        filled: Positions whose row part is known.
        rope: int64 [3, prompt length] for M-RoPE, or None to count up.
        lost: Rows of it were gone when they were to be read.
    """

    slot: int
    prompt_len: int
    greedy: bool
    filled: int = 0
    rope: torch.Tensor | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Positions of a request whose rows have come, and have to be made inputs."""

    slot: int
    start: int
    rows: Mapping[str, torch.Tensor]
    kinds: bytes
    token_ids: Sequence[int]


class _Slots:
    """Tensors with a row per request.

    Attributes:
        memory: int64 [slots, `frame_memory`], of each request's last frame.
        state: [slots, `frame_state`] in the model's dtype, likewise.
        temperature: float32 [slots].
        top_k: int64 [slots].
        top_p: float32 [slots].
        seed: int64 [slots].
        guidance: float32 [slots].
    """

    def __init__(
        self, slots: int, kept: OmniCapabilities, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.memory = torch.zeros(slots, kept.frame_memory, dtype=torch.int64, device=device)
        self.state = torch.zeros(slots, kept.frame_state, dtype=dtype, device=device)
        self.temperature = torch.zeros(slots, device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.guidance = torch.zeros(slots, device=device)
        self.free = list(range(slots))[::-1]

    def take(self) -> int:
        """A slot that nobody has. There are more requests than run at once while some of them are
        preempted; then there are twice as many slots."""
        if not self.free:
            count = len(self.seed)
            for name, tensor in vars(self).items():
                if isinstance(tensor, torch.Tensor):
                    setattr(self, name, torch.cat([tensor, torch.zeros_like(tensor)]))
            self.free = list(range(count, 2 * count))[::-1]
        return self.free.pop()

    def begin(self, requests: Sequence[tuple[int, wire.FrameSampling]]) -> None:
        """Take what new requests want, by their slots."""
        if not requests:
            return
        slot = to_device(torch.tensor([slot for slot, _ in requests]), self.seed.device)
        wanted = [frames for _, frames in requests]
        seeds = [_wrapped(each.seed) for each in wanted if each.seed is not None]
        whole = torch.tensor([[each.top_k for each in wanted], seeds])
        guidance = [math.nan if each.guidance is None else each.guidance for each in wanted]
        real = [[each.temperature for each in wanted], [each.top_p for each in wanted], guidance]
        self.memory[slot] = 0
        self.state[slot] = 0
        self.top_k[slot], self.seed[slot] = to_device(whole, self.seed.device)
        drawn = to_device(torch.tensor(real, dtype=torch.float32), self.seed.device)
        self.temperature[slot], self.top_p[slot], self.guidance[slot] = drawn


class RowState:
    """Inputs of all live requests of a row-driven model.

    Attributes:
        complete: How frames are completed: `RowDriven.frames` of the model, or the same faster.

    Args:
        model: The model class's pure functions.
        reader: Of upstream rows.
        device: Device of the model.
        dtype: Dtype of the model.
        max_requests: That run at once.
    """

    def __init__(
        self,
        model: RowDriven,
        reader: RowReader,
        device: torch.device,
        dtype: torch.dtype,
        max_requests: int,
    ) -> None:
        self._model = model
        self._reader = reader
        self._device = device
        self._pad = model.pad_input().to(device, dtype)
        self._slots = _Slots(max_requests, model.omni_capabilities, device, dtype)
        self._pages = RowPages(max_requests, self._pad)
        self._requests: dict[str, _Request] = {}
        self._new: list[tuple[int, wire.FrameSampling]] = []
        self._prompts: list[_Arrival | None] = []
        self._arrived: list[_Arrival | None] = []
        self._completed: list[_Request] = []
        self.complete: CompleteFrames = model.frames

    def knows(self, request_id: str) -> bool:
        """Whether it is a live request."""
        return request_id in self._requests

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        request: wire.StageRequest,
    ) -> None:
        """Take a new request with its prompt's rows; one that is known already is left as it is."""
        if request_id in self._requests:
            return
        assert request.rows is not None
        slot = self._slots.take()
        prompt_len = len(prompt_token_ids)
        state = _Request(slot, prompt_len, request.frames.temperature == 0)
        self._requests[request_id] = state
        self._pages.open(slot)
        assert request.frames.seed is not None
        self._new.append((slot, request.frames))
        self._prompts.append(self._arrival(state, request.rows, prompt_token_ids))
        if request.rows.final:
            self._completed.append(state)

    def append(self, updates: Mapping[str, Iterable[RowInput]]) -> None:
        """Take more positions for running requests, by their ids."""
        alike: dict[bytes, list[tuple[int, int, RowInput]]] = {}
        for request_id, messages in updates.items():
            state = self._requests[request_id]
            for rows in messages:
                shared = None if state.lost else layout(rows)
                if shared is None:
                    self._arrived.append(self._arrival(state, rows, ()))
                else:
                    alike.setdefault(shared, []).append((state.slot, state.filled, rows))
                    state.filled += 1
                if rows.final:
                    self._completed.append(state)
        for group in alike.values():
            slots, starts, messages = zip(*group, strict=True)
            upstream = self._reader.read_alike(messages)
            upstream.pop(POSITIONS, None)
            kinds = b"".join(rows.kinds for rows in messages)
            places = np.array(slots, dtype=np.int64), np.array(starts, dtype=np.int64)
            self._put(upstream, kinds, [-1] * len(group), *places)

    def settle(self) -> None:
        """Put what `add` and `append` took where steps find it."""
        self._slots.begin(self._new)
        for prompt in self._prompts:
            self._take([prompt])  # a model may encode it as a whole (Dia, VibeVoice)
        self._take(self._arrived)
        for state in self._completed:
            self._pages.complete(state.slot, state.filled)
        self._new, self._prompts, self._arrived, self._completed = [], [], [], []

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._slots.free.append(state.slot)
            self._pages.close(state.slot)

    def lost(self, request_id: str) -> bool:
        """Whether rows of a request were gone, so that what it computes means nothing.

        Its memory is freed when it is released, and the abort may be here a step later.
        """
        return self._requests[request_id].lost

    def mrope_positions(self, request_id: str) -> tuple[torch.Tensor, int]:
        """M-RoPE positions int64 [3, prompt length] and the delta of the positions after it."""
        state = self._requests[request_id]
        if state.rope is None:
            return torch.arange(state.prompt_len).expand(3, -1), 0
        return state.rope, int(state.rope.max()) + 1 - state.prompt_len

    def inputs(self, step: Step) -> torch.Tensor:
        """`inputs_embeds` [sum of counts, hidden_size] of a step, in the batch's order."""
        slots = self._slot_array(step)
        self._pages.reserve(slots, step.starts + step.counts)
        positions = _positions(step.starts, step.counts)
        where = self._pages.index(np.repeat(slots, step.counts), positions)
        chosen = to_device(torch.from_numpy(where), self._device)
        return self._model.combine(self._pages.row_part[chosen] + self._pages.frame_part[chosen])

    def sampled(self, step: Step, hidden: torch.Tensor, token_ids: torch.Tensor) -> Frames:
        """Complete the frames of a step's sampled tokens.

        Args:
            step: Of the requests that sampled one.
            hidden: [b, hidden_size] that the tokens were sampled from.
            token_ids: int64 [b].

        Returns:
            Their codes, and what counts as sampled.
        """
        slots, taken = self._slots, self._slot_array(step)
        positions = step.starts + step.counts
        self._pages.reserve(taken, positions + 1)
        # What the host knows of the step goes to the device in one piece.
        known = np.stack([taken, positions, self._pages.index(taken, positions)])
        slot, position, where = to_device(torch.from_numpy(known), self._device)
        sampling = FrameSampling(
            temperature=slots.temperature[slot],
            top_k=slots.top_k[slot],
            top_p=slots.top_p[slot],
            noise=Noise(slots.seed[slot], position),
            all_greedy=all(self._requests[each].greedy for each in step.request_ids),
            memory=slots.memory[slot],
            state=slots.state[slot],
            guidance=slots.guidance[slot],
        )
        frames = self.complete(hidden, token_ids, sampling)
        self._pages.frame_part[where] = frames.inputs
        if frames.memory is not None:
            slots.memory[slot] = frames.memory
        if frames.state is not None:
            slots.state[slot] = frames.state
        return frames

    def _slot_array(self, step: Step) -> np.ndarray:
        return np.array([self._requests[each].slot for each in step.request_ids], dtype=np.int64)

    def _arrival(
        self, state: _Request, rows: RowInput, prompt_token_ids: Sequence[int]
    ) -> _Arrival | None:
        """What a message brings; None if that is nothing, or means nothing any more."""
        start, count = state.filled, len(rows.index)
        state.filled += count
        if state.lost or count == 0:
            return None
        try:
            upstream = self._reader.read(rows)
        except KeyError:
            logger.debug("Rows are gone; their request is being aborted")
            state.lost = True
            return None
        if prompt_token_ids and POSITIONS in upstream:
            state.rope = rebase_positions(upstream[POSITIONS], rows.index[: state.prompt_len])
        # What a message appends beyond the prompt are decode positions: they have no id yet.
        token_ids = [*prompt_token_ids, *[-1] * (count - len(prompt_token_ids))]
        return _Arrival(state.slot, start, selected(upstream, rows.index), rows.kinds, token_ids)

    def _take(self, arrivals: Iterable[_Arrival | None]) -> None:
        """Make rows inputs: all of those that consist of the same parts at once."""
        alike: dict[tuple[str, ...], list[_Arrival]] = {}
        for arrival in arrivals:
            if arrival is not None:
                alike.setdefault(tuple(sorted(arrival.rows)), []).append(arrival)
        for names, group in alike.items():
            rows = {name: torch.cat([each.rows[name] for each in group]) for name in names}
            token_ids = [id_ for each in group for id_ in each.token_ids]
            counts = np.array([len(each.token_ids) for each in group], dtype=np.int64)
            starts = np.array([each.start for each in group], dtype=np.int64)
            slots = np.repeat(np.array([each.slot for each in group], dtype=np.int64), counts)
            kinds = b"".join(each.kinds for each in group)
            self._put(rows, kinds, token_ids, slots, _positions(starts, counts))

    def _put(
        self,
        rows: Mapping[str, torch.Tensor],
        kinds: bytes,
        token_ids: Sequence[int],
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Make rows inputs.

        Args:
            rows: By name, [n, ...].
            kinds: A byte per row.
            token_ids: Of each row, or -1.
            slots: int64 [n], of their requests.
            positions: int64 [n], in them.
        """
        row_part = self._model.row_inputs(
            {name: self._as_input(tensor) for name, tensor in rows.items()},
            to_device(torch.frombuffer(bytearray(kinds), dtype=torch.uint8), self._device),
            to_device(torch.tensor(token_ids), self._device),
        )
        used, request = np.unique(slots, return_inverse=True)
        stops = np.zeros(len(used), dtype=np.int64)
        np.maximum.at(stops, request, positions + 1)
        self._pages.reserve(used, stops)
        where = torch.from_numpy(self._pages.index(slots, positions))
        self._pages.row_part[to_device(where, self._device)] = row_part

    def _as_input(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the model takes them: floats in its dtype, ids as they are."""
        moved = to_device(rows, self._device)
        return moved.to(self._pad.dtype) if rows.is_floating_point() else moved


def _positions(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Of each of b requests, `counts` positions from `starts` on, int64 [sum of counts]."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _wrapped(seed: int) -> int:
    """A seed of any size as int64."""
    return (seed + 2**63) % 2**64 - 2**63
