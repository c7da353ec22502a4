# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner with rows out and rows in (used on CPU; see docs/design/ar_engine.md).

Only overridable methods of the runner are extended, at four points of a step: when request states
are updated, when inputs are prepared, when tokens are sampled, and when the step's output is made.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed import get_tp_group
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.ar.ranks import agree
from vllm_omni.ar.row_state import Step
from vllm_omni.ar.stage_rows import Emitted, StageRows, StepStates, with_spans
from vllm_omni.handles import RowSpan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class OmniCPUModelRunner(CPUModelRunner):
    """Model runner of an AR stage on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows = StageRows(self.vllm_config)
        self._sampled: Emitted | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        layer = self._rows.stage.hidden_layer
        if layer is not None:
            self.use_aux_hidden_state_outputs = True
        super().load_model(*args, **kwargs)
        if layer is not None:
            self.model.set_aux_hidden_state_layers((layer,))
        self._rows.attach(self.get_model(), self.device, self.dtype)

    def shutdown(self) -> None:
        super().shutdown()
        self._rows.close()

    # Request states.

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        self._rows.update(scheduler_output)
        return super()._update_states(scheduler_output)

    def _init_mrope_positions(self, req_state: "CachedRequestState") -> None:
        if self._rows.inputs is None:
            super()._init_mrope_positions(req_state)
            return
        positions, delta = self._rows.inputs.mrope_positions(req_state.req_id)
        req_state.mrope_positions, req_state.mrope_position_delta = positions, delta

    # Inputs.

    def _preprocess(
        self, scheduler_output: "SchedulerOutput", num_input_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        prepared = super()._preprocess(scheduler_output, num_input_tokens, *args, **kwargs)
        if self._rows.inputs is None:
            return prepared
        count = scheduler_output.total_num_scheduled_tokens
        self.inputs_embeds.gpu[:count] = self._rows.inputs.inputs(self._step())
        return (None, self.inputs_embeds.gpu[:num_input_tokens], *prepared[2:])

    def _step(self) -> Step:
        """The step's requests and which of their positions it computes, in the runner's order."""
        count = self.input_batch.num_reqs
        starts = self.input_batch.num_computed_tokens_cpu[:count].astype(np.int64)
        counts = np.diff(self.query_start_loc.np[: count + 1]).astype(np.int64)
        return Step(self.input_batch.req_ids[:count], starts, counts)

    # Outputs.

    def sample_tokens(self, grammar_output: Any) -> Any:
        step = self.execute_model_state
        if step is None or not self._rows.stage.emits:
            return super().sample_tokens(grammar_output)
        spans: dict[str, RowSpan] = {}
        if self._rows.inputs is None:
            spans = self._emit_hidden(step.hidden_states, step.aux_hidden_states)
        self._sampling_hidden = step.sample_hidden_states
        output = super().sample_tokens(grammar_output)
        if self._sampled is not None:
            spans = self._rows.hand_on(self._sampled)
            self._sampled = None
        return with_spans(output, spans)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        unused = [(each, each.get_state()) for each in self._unused_generators().values()]
        sampled = super()._sample(logits, spec_decode_metadata)
        for generator, state in unused:
            generator.set_state(state)
        agree(get_tp_group(), sampled.sampled_token_ids)
        self._complete_frames(sampled.sampled_token_ids)
        return sampled

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM turns back generators whose number was not used by their offset, which only CUDA's
        # have; `_sample` has done so, and here they are out of its sight.
        hidden = self._unused_generators()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    def _unused_generators(self) -> dict[int, torch.Generator]:
        """Generators of the requests whose prompt is not complete, by index in the batch."""
        discarded = self.discard_request_mask.np
        return {i: g for i, g in self.input_batch.generators.items() if discarded[i]}

    def _complete_frames(self, sampled: torch.Tensor) -> None:
        """Run the rest of the frame for every request that sampled a token in this step.

        Args:
            sampled: int [b, 1]; tokens that the model replaces are written over.
        """
        if self._rows.inputs is None:
            return
        step = self._step()
        kept = np.flatnonzero(~self.discard_request_mask.np[: len(step.request_ids)])
        if not len(kept):
            return
        step = step.of(kept)
        hidden, tokens = self._sampling_hidden[kept], sampled[kept, 0]
        agree(get_tp_group(), hidden)
        frames = self._rows.inputs.sampled(step, hidden, tokens.to(torch.int64))
        if frames.tokens is not None:
            sampled[kept, 0] = frames.tokens.to(sampled.dtype)
        wanted, indices = self._rows.frames_wanted(step)
        rows = self._rows.frames_as_rows(frames.codes[indices])
        self._sampled = Emitted(wanted, {name: row.cpu() for name, row in rows.items()})

    def _emit_hidden(
        self, hidden: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> dict[str, RowSpan]:
        wanted, tokens = self._rows.hidden_wanted(self._step())
        if not wanted:
            return {}
        states = StepStates(
            embeds=self._inputs(len(hidden)),
            hidden=hidden,
            positions=self.mrope_positions.gpu if self.uses_mrope else None,
            layer=aux[0] if aux else None,
        )
        return self._rows.hand_on(Emitted(wanted, self._rows.hidden_rows(states, tokens)))

    def _inputs(self, count: int) -> torch.Tensor:
        """What the model was given, [at least n, hidden_size]."""
        if self.supports_mm_inputs or self.enable_prompt_embeds:
            return self.inputs_embeds.gpu
        # It was given token ids: media are switched off (`limit_mm_per_prompt`).
        return self.model.embed_input_ids(self.input_ids.gpu[:count])
