# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner with rows out and rows in (used on CPU; see docs/design/ar_engine.md).

Only overridable methods of the runner are extended, at four points of a step: when request states
are updated, when inputs are prepared, when tokens are sampled, and when the step's output is made.
"""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_omni.ar.row_state import RowState, Slice
from vllm_omni.ar.scheduler import OmniModelRunnerOutput, OmniSchedulerOutput
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.wire import StageRequest, read_request
from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.factory import create_connector
from vllm_omni.handles import LOST, RowSpan
from vllm_omni.models.interfaces import RowDriven

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


logger = init_logger(__name__)


class OmniCPUModelRunner(CPUModelRunner):
    """Model runner of an AR stage on CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stage = ArStageConfig.of(self.vllm_config)
        self._connector = create_connector(
            self._stage.connector, self._stage.connector_extra, self._stage.deployment_id
        )
        self._stage_requests: dict[str, StageRequest] = {}
        self._rows: RowState | None = None
        self._codes: dict[str, RowCodes] = {}
        self._puts = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        layer = self._stage.hidden_layer
        if layer is not None:
            self.use_aux_hidden_state_outputs = True
        super().load_model(*args, **kwargs)
        if layer is not None:
            self.model.set_aux_hidden_state_layers((layer,))
        if self._stage.row_driven:
            model = self.get_model()
            assert isinstance(model, RowDriven), f"{type(model).__name__} is not row-driven"
            self._rows = RowState(
                model,
                self._connector,
                self._stage.source,
                self._stage.stage,
                self.device,
                self.dtype,
            )

    def shutdown(self) -> None:
        super().shutdown()
        self._connector.close()

    # Request states.

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._stage_requests.pop(request_id, None)
            if self._rows is not None:
                self._rows.remove(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            request = read_request(new.sampling_params)
            if request is None:
                continue
            self._stage_requests[new.req_id] = request
            if self._rows is not None:
                assert new.prompt_token_ids is not None
                self._rows.add(new.req_id, new.prompt_token_ids, request)
        if isinstance(scheduler_output, OmniSchedulerOutput) and self._rows is not None:
            for request_id, updates in scheduler_output.omni_updates.items():
                self._rows.append(request_id, updates)
        return super()._update_states(scheduler_output)

    def _init_mrope_positions(self, req_state: "CachedRequestState") -> None:
        if self._rows is None:
            super()._init_mrope_positions(req_state)
            return
        positions, delta = self._rows.mrope_positions(req_state.req_id)
        req_state.mrope_positions, req_state.mrope_position_delta = positions, delta

    # Inputs.

    def _preprocess(
        self, scheduler_output: "SchedulerOutput", num_input_tokens: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        prepared = super()._preprocess(scheduler_output, num_input_tokens, *args, **kwargs)
        if self._rows is None:
            return prepared
        count = scheduler_output.total_num_scheduled_tokens
        self.inputs_embeds.gpu[:count] = self._rows.inputs(self._batch())
        return (None, self.inputs_embeds.gpu[:num_input_tokens], *prepared[2:])

    def _batch(self) -> list[Slice]:
        """The step's requests and which of their positions it computes, in the runner's order."""
        count = self.input_batch.num_reqs
        starts = self.query_start_loc.np
        computed = self.input_batch.num_computed_tokens_cpu
        return [
            Slice(request_id, int(computed[i]), int(starts[i + 1] - starts[i]))
            for i, request_id in enumerate(self.input_batch.req_ids[:count])
        ]

    # Outputs.

    def sample_tokens(self, grammar_output: Any) -> Any:
        step = self.execute_model_state
        if step is None or not self._stage.emits:
            return super().sample_tokens(grammar_output)
        batch = self._batch()
        spans: dict[str, RowSpan] = {}
        if self._rows is None:
            spans = self._emit_hidden(batch, step.hidden_states, step.aux_hidden_states)
        self._sampling_hidden = step.sample_hidden_states
        output = super().sample_tokens(grammar_output)
        if self._rows is not None:
            spans = self._emit_codes()
        return _with_spans(output, spans)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        unused = [(each, each.get_state()) for each in self._unused_generators().values()]
        sampled = super()._sample(logits, spec_decode_metadata)
        for generator, state in unused:
            generator.set_state(state)
        if self._rows is not None:
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
        assert self._rows is not None
        self._codes = {}
        batch = self._batch()
        discarded = self.discard_request_mask.np
        kept = [i for i in range(len(batch)) if not discarded[i]]
        if not kept:
            return
        pieces = [Slice(batch[i].request_id, batch[i].start + batch[i].count, 1) for i in kept]
        if len(kept) == len(batch):
            hidden, tokens = self._sampling_hidden, sampled[:, 0]
        else:
            hidden, tokens = self._sampling_hidden[kept], sampled[kept, 0]
        frames = self._rows.sampled(pieces, hidden, tokens.to(torch.int64))
        if frames.tokens is not None:
            sampled[kept, 0] = frames.tokens.to(sampled.dtype)
        codes = frames.codes.to("cpu", torch.int32)
        for piece, frame in zip(pieces, codes, strict=True):
            prompt_len = len(self.requests[piece.request_id].prompt_token_ids or ())
            self._codes[piece.request_id] = RowCodes(piece.start - prompt_len, frame[None])

    def _emit_codes(self) -> dict[str, RowSpan]:
        assert self._rows is not None
        spans = {}
        for request_id, codes in self._codes.items():
            request = self._stage_requests[request_id]
            if request.emit and not self._rows.lost(request_id):
                spans[request_id] = self._put(request, codes.start, {"codes": codes.codes})
        return spans

    def _emit_hidden(
        self, batch: list[Slice], hidden: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> dict[str, RowSpan]:
        spans, offset = {}, 0
        for piece in batch:
            here = slice(offset, offset + piece.count)
            offset += piece.count
            request = self._stage_requests.get(piece.request_id)
            if request is None or not request.emit:
                continue
            rows: dict[str, torch.Tensor] = {}
            for name in self._stage.emits:
                if name == "embeds":
                    rows[name] = self.inputs_embeds.gpu[here]
                elif name == "hidden":
                    rows[name] = hidden[here]
                elif name == "positions":
                    prompt_len = len(self.requests[piece.request_id].prompt_token_ids or ())
                    if piece.start < prompt_len:
                        rows[name] = self.mrope_positions.gpu[:, here].T.to(torch.int32)
                else:
                    assert aux is not None
                    rows["hidden"] = aux[0][here]
            spans[piece.request_id] = self._put(request, piece.start, rows)
        return spans

    def _put(self, request: StageRequest, start: int, rows: dict[str, torch.Tensor]) -> RowSpan:
        count = next(iter(rows.values())).shape[0]
        self._puts += 1
        key = make_key(request.request_id, f"{self._stage.stage}-{os.getpid()}-{self._puts}")
        result = self._connector.put(self._stage.stage, self._stage.target, key, rows)
        if result.handle is None:
            # The step has other requests too; this one fails when the span arrives.
            logger.warning(
                "Request %s: the connector has no room for %d bytes of rows",
                request.request_id,
                result.size,
            )
        return RowSpan(start, count, result.handle or LOST)


@dataclasses.dataclass(frozen=True, slots=True)
class RowCodes:
    """One frame of a request: its index among the generated tokens, and int32 [1, groups]."""

    start: int
    codes: torch.Tensor


def _with_spans(output: ModelRunnerOutput, spans: dict[str, RowSpan]) -> ModelRunnerOutput:
    """The runner's output with emitted rows, as the scheduler reads them."""
    if not spans:
        return output
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(ModelRunnerOutput)}
    return OmniModelRunnerOutput(**fields, omni_spans=spans)
