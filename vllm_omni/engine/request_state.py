# SPDX-License-Identifier: Apache-2.0
"""What the orchestrator remembers about one request."""

import time
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vllm_omni.config.pipeline import EdgeState, Stage
from vllm_omni.engine.messages import Submit
from vllm_omni.engine.observations import Seen
from vllm_omni.outputs import StageMetrics, StageOutput, TokenOutput


@dataclass(slots=True)
class _StageTimes:
    replica: int
    submitted: float
    first_output: float | None = None
    finished: float | None = None
    outputs: int = 0
    tokens: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True)
class RequestState:
    """One live request: which stages it visits, how far each has got, and its edges.

    Attributes:
        needed: Stages that it visits, by name.
        edges: Its passage over each edge between needed stages: (target, edge) by source.
        text_kind: How the caller wants text (deltas, cumulative, at the end).
        submit: What was submitted, until the caller has got anything of it.
        seen: What the observer has noted of it.
        open_stages: Stages that have not ended (or been skipped).
    """

    request_id: str
    needed: dict[str, Stage]
    params: tuple[Any, ...]
    modalities: frozenset[str]
    voice: str | None
    arrival: float
    edges: dict[str, list[tuple[str, EdgeState]]]
    text_kind: RequestOutputKind
    seen: Seen
    submit: Submit | None = None
    open_stages: set[str] = field(default_factory=set)
    times: dict[str, _StageTimes] = field(default_factory=dict)
    _text: RequestOutput | None = None

    def __post_init__(self) -> None:
        self.open_stages = set(self.needed)

    def feeds_others(self, stage: str) -> bool:
        """Whether another stage of this request takes this stage's output."""
        return stage in self.edges

    def reserve(self, stage: str) -> None:
        """Note that the request is about to enter a stage: further input for it is an update."""
        self.times[stage] = _StageTimes(-1, time.monotonic())

    def submitted_to(self, stage: str, replica: int) -> None:
        """Note that the request entered a stage."""
        self.times[stage] = _StageTimes(replica, time.monotonic())

    def note_output(self, stage: str, output: StageOutput, now: float) -> None:
        """Account for an output of a stage that came at `now` (`time.monotonic`)."""
        times = self.times[stage]
        times.first_output = times.first_output or now
        times.outputs += 1
        if isinstance(output, TokenOutput):
            times.tokens += len(output.new_token_ids)
            if output.prompt_token_ids is not None:
                times.prompt_tokens = len(output.prompt_token_ids)
        if output.finished:
            times.finished = now

    def assemble_text(self, delta: RequestOutput) -> RequestOutput | None:
        """Turn a stage's text delta into what the caller asked for; None while it waits.

        A stage that feeds others runs in deltas whatever the caller wants.
        """
        if self.text_kind == RequestOutputKind.DELTA:
            return delta
        if self._text is None:
            self._text = delta
        else:
            self._text.add(delta, aggregate=True)
        if self.text_kind == RequestOutputKind.FINAL_ONLY:
            return self._text if delta.finished else None
        # The caller keeps what it gets; the next delta must not change it.
        made = copy(self._text)
        made.outputs = [copy(completion) for completion in made.outputs]
        return made

    def metrics(self) -> tuple[StageMetrics, ...]:
        """Per-stage timing relative to the request's arrival, in visiting order."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival

        return tuple(
            StageMetrics(
                stage=name,
                replica=times.replica,
                submitted_s=times.submitted - self.arrival,
                first_output_s=since(times.first_output),
                finished_s=since(times.finished),
                outputs=times.outputs,
                tokens=times.tokens,
                prompt_tokens=times.prompt_tokens,
            )
            for name, times in self.times.items()
        )
