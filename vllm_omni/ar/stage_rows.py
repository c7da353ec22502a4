# SPDX-License-Identifier: Apache-2.0
"""What a model runner does about rows, whichever of vLLM's two it is: it knows the requests of the
stage, keeps the inputs of a row-driven model, and puts what is emitted into the connector."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.ar.row_reading import POSITIONS, RowReader
from vllm_omni.ar.row_state import RowState, Step
from vllm_omni.ar.scheduler import OmniModelRunnerOutput, OmniSchedulerOutput
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.wire import StageRequest, read_request
from vllm_omni.connectors.base import PutResult, make_key
from vllm_omni.connectors.factory import create_connector
from vllm_omni.handles import LOST, RowSpan
from vllm_omni.models.interfaces import RowDriven

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Request:
    """A live request of the stage."""

    stage: StageRequest
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Emission:
    """Rows that a step makes of a request.

    Attributes:
        request_id: vLLM's internal one.
        stage: The stage's request.
        start: Position of the first row (frames are counted from the end of the prompt).
        count: Of rows.
        in_prompt: They begin in the prompt.
    """

    request_id: str
    stage: StageRequest
    start: int
    count: int
    in_prompt: bool


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step emits.

    Attributes:
        emissions: Whose rows.
        rows: By name, [sum of counts, ...], in the same order.
    """

    emissions: Sequence[Emission]
    rows: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepStates:
    """What a model that is no talker was fed and made in a step of n tokens.

    Attributes:
        embeds: Inputs, [at least n, hidden_size].
        hidden: Final hidden states, [at least n, hidden_size].
        positions: M-RoPE positions, int64 [3, at least n]; None of a model without.
        layer: Hidden states of the layer that the stage emits; None if it emits none.
    """

    embeds: torch.Tensor | None
    hidden: torch.Tensor
    positions: torch.Tensor | None
    layer: torch.Tensor | None

    def rows(self, name: str, tokens: Any) -> torch.Tensor:
        """Copies of the rows that are emitted as `name`, of some tokens."""
        if name == POSITIONS:
            assert self.positions is not None
            return self.positions[:, tokens].T.to(torch.int32)
        chosen = {"embeds": self.embeds, "hidden": self.hidden}.get(name, self.layer)
        assert chosen is not None
        return chosen[tokens]


class StageRows:
    """Rows of an AR stage's requests.

    Args:
        vllm_config: Of the stage.

    Attributes:
        stage: Its place in the pipeline.
        inputs: Of a row-driven model that is loaded, else None.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.stage = ArStageConfig.of(vllm_config)
        self.inputs: RowState | None = None
        self._max_requests = vllm_config.scheduler_config.max_num_seqs
        self._connector = create_connector(
            self.stage.connector, self.stage.connector_extra, self.stage.deployment_id
        )
        self._requests: dict[str, _Request] = {}
        self._puts = 0

    def attach(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Take the loaded model, whose inputs are kept from now on if it is row-driven."""
        if not self.stage.row_driven:
            return
        assert isinstance(model, RowDriven), f"{type(model).__name__} is not row-driven"
        reader = RowReader(self._connector, self.stage.source, self.stage.stage)
        self.inputs = RowState(model, reader, device, dtype, self._max_requests)

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Take what a step brings: requests that ended, new ones, and rows of running ones."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
            if self.inputs is not None:
                self.inputs.remove(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            request = read_request(new.sampling_params)
            if request is None:
                continue
            assert new.prompt_token_ids is not None
            self._requests.setdefault(new.req_id, _Request(request, len(new.prompt_token_ids)))
            if self.inputs is not None:
                self.inputs.add(new.req_id, new.prompt_token_ids, request)
        if self.inputs is None:
            return
        if isinstance(scheduler_output, OmniSchedulerOutput):
            self.inputs.append(scheduler_output.omni_updates)
        self.inputs.settle()

    def hidden_wanted(self, step: Step) -> tuple[list[Emission], np.ndarray]:
        """Whose rows of a step are wanted downstream, and which of the step's tokens those are.

        Returns:
            What is emitted, and int64 [sum of counts], indices of tokens in the step's order.
        """
        wanted: list[Emission] = []
        tokens: list[np.ndarray] = []
        ends = np.cumsum(step.counts).tolist()
        pieces = zip(
            step.request_ids, step.starts.tolist(), step.counts.tolist(), ends, strict=True
        )
        for request_id, start, count, end in pieces:
            request = self._requests.get(request_id)
            if request is not None and request.stage.emit:
                in_prompt = start < request.prompt_len
                wanted.append(Emission(request_id, request.stage, start, count, in_prompt))
                tokens.append(np.arange(end - count, end))
        return wanted, np.concatenate(tokens or [np.empty(0, dtype=np.int64)])

    def frames_wanted(self, step: Step) -> tuple[list[Emission], list[int]]:
        """Whose frames of a step are wanted downstream, and which of the step's those are.

        Frames of requests whose inputs were gone mean nothing.
        """
        assert self.inputs is not None
        wanted: list[Emission] = []
        indices: list[int] = []
        stops = (step.starts + step.counts).tolist()
        for i, (request_id, stop) in enumerate(zip(step.request_ids, stops, strict=True)):
            request = self._requests[request_id]
            if request.stage.emit and not self.inputs.lost(request_id):
                frame = stop - request.prompt_len
                wanted.append(Emission(request_id, request.stage, frame, 1, False))
                indices.append(i)
        return wanted, indices

    def frames_as_rows(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        """Frames [n, ...] under the stage's name for them, in the type that they travel in."""
        (name,) = self.stage.emits
        return {name: frames.to(torch.float32 if frames.is_floating_point() else torch.int32)}

    def hidden_rows(self, states: StepStates, tokens: Any) -> dict[str, torch.Tensor]:
        """Copies of what the stage emits, by the name that it travels under.

        Args:
            states: Of the step.
            tokens: Indices, as `hidden_wanted` gives them.
        """
        return {name.partition(":")[0]: states.rows(name, tokens) for name in self.stage.emits}

    def hand_on(self, emitted: Emitted) -> dict[str, RowSpan]:
        """Put rows of several requests into the connector.

        Returns:
            Where they are, by internal request id.
        """
        if all(each.count == 1 and not each.in_prompt for each in emitted.emissions):
            return self._hand_on_one_each(emitted)
        spans, offset = {}, 0
        for each in emitted.emissions:
            here = slice(offset, offset + each.count)
            offset += each.count
            own = {
                name: tensor[here]
                for name, tensor in emitted.rows.items()
                if name != POSITIONS or each.in_prompt
            }
            key = self._next_key(each)
            result = self._connector.put(self.stage.stage, self.stage.target, key, own)
            spans[each.request_id] = self._span(each, result)
        return spans

    def _hand_on_one_each(self, emitted: Emitted) -> dict[str, RowSpan]:
        """The same of a row of each request, as decode steps make them."""
        rows = {name: tensor for name, tensor in emitted.rows.items() if name != POSITIONS}
        keys = [self._next_key(each) for each in emitted.emissions]
        results = self._connector.put_rows(self.stage.stage, self.stage.target, keys, rows)
        pairs = zip(emitted.emissions, results, strict=True)
        return {each.request_id: self._span(each, result) for each, result in pairs}

    def _next_key(self, emission: Emission) -> str:
        self._puts += 1
        suffix = f"{self.stage.stage}-{os.getpid()}-{self._puts}"
        return make_key(emission.stage.request_id, suffix)

    def _span(self, emission: Emission, result: PutResult) -> RowSpan:
        if result.handle is None:
            # The step has other requests too; this one fails when the span arrives.
            logger.warning(
                "Request %s: the connector has no room for %d bytes of rows",
                emission.stage.request_id,
                result.size,
            )
        return RowSpan(emission.start, emission.count, result.handle or LOST)

    def close(self) -> None:
        """Let go of the connector."""
        self._connector.close()


def with_spans(output: ModelRunnerOutput, spans: dict[str, RowSpan]) -> ModelRunnerOutput:
    """The runner's output with emitted rows, as the scheduler reads them."""
    if not spans:
        return output
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(ModelRunnerOutput)}
    return OmniModelRunnerOutput(**fields, omni_spans=spans)
