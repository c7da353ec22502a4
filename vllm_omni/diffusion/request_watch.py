# SPDX-License-Identifier: Apache-2.0
"""What a worker process tells of its requests: lines in the log, spans, time spent on input."""

import logging
from collections.abc import Mapping

from opentelemetry.trace import Span

from vllm_omni.tracing import start_span

logger = logging.getLogger(__name__)


class RequestWatch:
    """Follows the requests of one worker.

    Args:
        stage: Name of the stage.
        log_requests: Log at INFO and not at DEBUG.
    """

    def __init__(self, stage: str, log_requests: bool) -> None:
        self._stage = stage
        self._level = logging.INFO if log_requests else logging.DEBUG
        self._spans: dict[str, Span] = {}
        self._read_s: dict[str, float] = {}

    def begin(self, request_id: str, trace: Mapping[str, str]) -> None:
        """A request came; it has a span if it has trace headers."""
        logger.log(self._level, "Request %s enters the engine of stage %s", request_id, self._stage)
        if trace:
            span = self._spans[request_id] = start_span(f"run {self._stage}", trace)
            span.set_attribute("gen_ai.request.id", request_id)

    def read(self, request_id: str, seconds: float) -> None:
        """Reading a piece of its input took that long."""
        self._read_s[request_id] = self._read_s.get(request_id, 0.0) + seconds

    def read_s(self, request_id: str) -> float:
        """Seconds of reading since the last call."""
        return self._read_s.pop(request_id, 0.0)

    def end(self, request_id: str, how: str) -> None:
        """A request went; unknown ones are ignored but for the log."""
        logger.log(
            self._level,
            "Request %s leaves the engine of stage %s: %s",
            request_id,
            self._stage,
            how,
        )
        self._read_s.pop(request_id, None)
        if (span := self._spans.pop(request_id, None)) is not None:
            span.set_attribute("vllm_omni.outcome", how)
            span.end()
