# SPDX-License-Identifier: Apache-2.0
"""What vLLM's Model Runner V2 asks of models about the inputs of a step, where ours differ."""

from typing import Any, Protocol

import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState


class Feed(Protocol):
    """Where inputs come from; the AR engine's."""

    def knows(self, request_id: str) -> bool:
        """Whether the request is one of ours; those of vLLM's warm-up are not."""

    def embeds(self, batch: InputBatch) -> torch.Tensor:
        """Inputs of a step, [n, hidden_size]."""

    def mrope_positions(self, request_id: str) -> tuple[torch.Tensor, int]:
        """M-RoPE positions int64 [3, prompt length] and the delta of the positions after it."""


class RowModelState(DefaultModelState):
    """State of a row-driven model. It is made by vLLM; the runner gives it its `feed`."""

    feed: Feed

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Positions of a request are those of its rows."""
        if self.rope_state is None:
            return
        tokens = new_req_data.prefill_token_ids
        assert tokens is not None
        model = self.model
        if self.feed.knows(new_req_data.req_id):
            model = _Positions(*self.feed.mrope_positions(new_req_data.req_id))
        self.rope_state.init_prefill_positions(req_index, model, tokens, mm_features=[])

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor:
        """Inputs of a step, in the buffer that CUDA graphs read."""
        if self.feed.knows(input_batch.req_ids[0]):
            self.inputs_embeds[: input_batch.num_tokens] = self.feed.embeds(input_batch)
        return self.inputs_embeds[: input_batch.num_tokens_after_padding]


class EmbedsModelState(DefaultModelState):
    """State of a model whose inputs are wanted downstream.

    They cannot be read once the model has run: vLLM's layers add to them in place.

    Attributes:
        embeds: Inputs of the last step, [n, hidden_size].
    """

    embeds: torch.Tensor

    def prepare_inputs_embeds(
        self,
        scheduled_encoder_inputs: dict[str, list[int]],
        input_batch: InputBatch,
        req_states: RequestState,
    ) -> torch.Tensor:
        """vLLM's, of which a copy is kept."""
        made = super().prepare_inputs_embeds(scheduled_encoder_inputs, input_batch, req_states)
        self.embeds = made[: input_batch.num_tokens].clone()
        return made


class _Positions(torch.nn.Module):
    """Positions that are known, as vLLM asks a model for them.

    A request that was preempted is computed again up to where it was: the positions of what it has
    generated follow those of its prompt.
    """

    def __init__(self, prompt: torch.Tensor, delta: int) -> None:
        super().__init__()
        self._prompt, self._delta = prompt, delta

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """See vLLM's `SupportsMRoPE`."""
        start, stop = self._prompt.shape[1], len(input_tokens)
        after = torch.arange(start, stop) + self._delta
        return torch.cat([self._prompt, after.expand(3, -1)], dim=1), self._delta
