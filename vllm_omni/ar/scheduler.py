# SPDX-License-Identifier: Apache-2.0
"""The scheduler of an AR stage: vLLM's own, plus rows out, rows in and the gate.

* Rows out: what the model runner emitted for a request waits until the request has an output
  (chunked prefill steps have none) and leaves with it. Rows that are recomputed after a preemption
  are dropped.
* Rows in: updates for running requests arrive as a control message and go to the runner with the
  next step.
* Gate: a running request whose next position has no row yet is left out of the step. It keeps its
  KV cache, and an engine with nothing but such requests sleeps instead of spinning.
* Prefix hits of prompts that are rows: see `prefix.py`.
"""

import dataclasses
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_omni.ar.prefix import ContentHashing
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.wire import CONTROL_REQUEST_ID, attach_spans, read_request, read_updates
from vllm_omni.connectors.factory import create_connector
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import RowInput

logger = init_logger(__name__)


@dataclass
class OmniSchedulerOutput(SchedulerOutput):
    """vLLM's scheduler output with row updates for requests of (or before) this step."""

    omni_updates: dict[str, list[RowInput]] = field(default_factory=dict)


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """vLLM's model runner output with the rows that requests emitted, by internal request id."""

    omni_spans: dict[str, RowSpan] = field(default_factory=dict)


class _RowsOut:
    """Emitted rows that have not left yet, and how far each request's rows have got."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[RowSpan]] = defaultdict(list)
        self._covered: dict[str, int] = defaultdict(int)

    def add(self, request_id: str, span: RowSpan) -> bool:
        """Take a span; False if it only repeats rows (a preempted request was recomputed)."""
        if span.stop <= self._covered[request_id]:
            return False
        self._covered[request_id] = span.stop
        self._waiting[request_id].append(span)
        return True

    def take(self, request_id: str) -> list[RowSpan]:
        return self._waiting.pop(request_id, [])

    def drop(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._covered.pop(request_id, None)


@dataclass(slots=True)
class _Inflow:
    """How many input positions a row-driven request has, and what the runner has not seen."""

    positions: int
    final: bool
    unsent: list[RowInput] = field(default_factory=list)

    def append(self, rows: RowInput) -> None:
        self.positions += len(rows.index)
        self.final = self.final or rows.final
        self.unsent.append(rows)


class _RowScheduling(Scheduler):
    """What rows and the gate add to either of vLLM's schedulers; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stage = ArStageConfig.of(self.vllm_config)
        self._connector = create_connector(
            self._stage.connector, self._stage.connector_extra, self._stage.deployment_id
        )
        self._hashing = ContentHashing(
            self.cache_config.prefix_caching_hash_algo, self.hash_block_size
        )
        self._rows_out = _RowsOut()
        self._inflows: dict[str, _Inflow] = {}
        self._pipeline_ids: dict[str, str] = {}

    # Rows in.

    def add_request(self, request: Request) -> None:
        if request.request_id == CONTROL_REQUEST_ID:
            self._apply_updates(request)
            return
        stage_request = read_request(request.sampling_params)
        if stage_request is not None:
            self._pipeline_ids[request.request_id] = stage_request.request_id
            if stage_request.rows is not None:
                self._inflows[request.request_id] = _Inflow(
                    len(stage_request.rows.index), stage_request.rows.final
                )
            if stage_request.contents and self.cache_config.enable_prefix_caching:
                request = self._hashing.hashed(request, stage_request.contents)
        self._log("Request %s enters the engine of stage %s", request)
        super().add_request(request)

    def _apply_updates(self, control: Request) -> None:
        for update in read_updates(control.sampling_params):
            inflow = self._inflows.get(update.internal_id)
            if inflow is not None:
                inflow.append(update.rows)
            else:
                self._free_spans(update.rows.spans)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        request_id = request.request_id
        inflow = self._inflows.pop(request_id, None)
        for rows in inflow.unsent if inflow else ():
            self._free_spans(rows.spans)
        self._log("Request %s leaves the engine of stage %s", request)
        return super()._free_request(request, *args, **kwargs)

    def _log(self, text: str, request: Request) -> None:
        """The id is vLLM's, which starts with the pipeline's."""
        level = logging.INFO if self._stage.log_requests else logging.DEBUG
        logger.log(level, text, request.request_id, self._stage.stage)

    # The gate.

    def _starved(self, request: Request) -> bool:
        inflow = self._inflows.get(request.request_id)
        return (
            inflow is not None
            and not inflow.final
            and request.num_computed_tokens >= inflow.positions
        )

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if not self._inflows:
            return super().schedule(*args, **kwargs)
        held = [request for request in self.running if self._starved(request)]
        if not held:
            return self._with_updates(super().schedule(*args, **kwargs))
        # A held request still occupies its slot: the step may start no more requests than before.
        held_ids = {request.request_id for request in held}
        self.running = [each for each in self.running if each.request_id not in held_ids]
        self.max_num_running_reqs -= len(held)
        self.max_num_active_reqs -= len(held)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running = held + self.running
            self.max_num_running_reqs += len(held)
            self.max_num_active_reqs += len(held)
        return self._with_updates(output)

    def _with_updates(self, output: SchedulerOutput) -> SchedulerOutput:
        updates = {}
        for request_id in output.num_scheduled_tokens:
            inflow = self._inflows.get(request_id)
            if inflow is not None and inflow.unsent:
                updates[request_id] = inflow.unsent
                inflow.unsent = []
        if not updates:
            return output
        fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(SchedulerOutput)}
        return OmniSchedulerOutput(**fields, omni_updates=updates)

    def get_num_unfinished_requests(self) -> int:
        unfinished = super().get_num_unfinished_requests()
        if not self._inflows:
            return unfinished
        return unfinished - sum(map(self._starved, self.running))

    # Rows out.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, OmniModelRunnerOutput):
            for request_id, span in model_runner_output.omni_spans.items():
                live = request_id in self.requests
                if not (live and self._rows_out.add(request_id, span)):
                    self._free_spans([span])
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._pipeline_ids:
            self._send_rows(outputs)
        return outputs

    def _send_rows(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for group in outputs.values():
            for output in group.outputs:
                if spans := self._rows_out.take(output.request_id):
                    output.kv_transfer_params = attach_spans(output.kv_transfer_params, spans)
        for request_id in self._pipeline_ids.keys() - self.requests.keys():
            self._free_spans(self._rows_out.take(request_id))
            self._rows_out.drop(request_id)
            del self._pipeline_ids[request_id]

    def _free_spans(self, spans: list[RowSpan]) -> None:
        for span in spans:
            self._connector.discard(span.handle)

    def shutdown(self) -> None:
        super().shutdown()
        self._connector.close()


class OmniScheduler(_RowScheduling):
    """vLLM's scheduler with rows and the gate: a step begins when the one before it has ended."""


class OmniAsyncScheduler(_RowScheduling, AsyncScheduler):
    """The same of the scheduler that plans a step while the one before it runs (on CUDA)."""
