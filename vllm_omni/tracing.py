# SPDX-License-Identifier: Apache-2.0
"""One OpenTelemetry trace per request, over all processes (`--otlp-traces-endpoint`).

    request                      the orchestrator; child of the client's span, if it sent one
    ├── stage thinker            with vLLM's own `llm_request` below
    │   └── queue
    ├── transfer thinker talker
    ├── stage talker
    └── stage code2wav
        └── run code2wav         the worker process

The context travels as W3C headers with a request's first message to a stage. Spans are made when a
request enters and leaves a stage, never per token.
"""

import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from vllm.tracing.otel import get_span_exporter

SCOPE = "vllm_omni"
FLUSH_S = 2.0
"""What the last spans of an ending process may take to be sent."""
_propagator = TraceContextTextMapPropagator()


def start_tracing(endpoint: str, process: str) -> None:
    """Export this process's spans from now on.

    Not vLLM's `init_tracer`: at exit that waits as long as it takes to reach the collector.

    Args:
        endpoint: Where to; gRPC unless `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` is `http/protobuf`.
        process: Name of the process, for the spans' resource.
    """
    provider = TracerProvider(
        resource=Resource.create({"vllm.process_name": process}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(get_span_exporter(endpoint)))
    trace.set_tracer_provider(provider)


def flush_tracing() -> None:
    """Send what has not been sent, before the process ends; waits `FLUSH_S` at most."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        # In a thread: the batch processor does not keep to a timeout.
        flush = threading.Thread(target=provider.force_flush, name="flush-traces", daemon=True)
        flush.start()
        flush.join(FLUSH_S)


def start_span(
    name: str, parent: Mapping[str, str] | Context | None, at_ns: int | None = None
) -> Span:
    """A span below a parent given by W3C headers or a context; a new trace without one."""
    context = parent if isinstance(parent, Context) else _propagator.extract(dict(parent or {}))
    return trace.get_tracer(SCOPE).start_span(name, context, start_time=at_ns)


class RequestTrace:
    """The spans of one request in the orchestrator.

    Args:
        request_id: For the spans' attributes.
        headers: The client's W3C headers.
        arrival: `time.monotonic()` when the request came.
    """

    def __init__(self, request_id: str, headers: Mapping[str, str] | None, arrival: float) -> None:
        parent = _propagator.extract(dict(headers or {}))
        self._root = trace.get_tracer(SCOPE).start_span(
            "request",
            parent,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.request.id": request_id},
            start_time=_ns(arrival),
        )
        self._context = trace.set_span_in_context(self._root)
        self._stages: dict[str, Span] = {}

    def enter(self, stage: str, replica: int) -> dict[str, str]:
        """The request is submitted to a stage; the headers to send along."""
        span = self._stages[stage] = start_span(f"stage {stage}", self._context)
        span.set_attributes({"vllm_omni.stage": stage, "vllm_omni.replica": replica})
        headers: dict[str, str] = {}
        _propagator.inject(headers, trace.set_span_in_context(span))
        return headers

    def leave(self, stage: str, tokens: int, queue: tuple[float, float] | None) -> None:
        """The stage has ended.

        Args:
            stage: Its name.
            tokens: It made.
            queue: When its engine got the request and when it began with it (monotonic).
        """
        span = self._stages.pop(stage, None)
        if span is None:
            return
        if queue is not None:
            waiting = start_span("queue", trace.set_span_in_context(span), _ns(queue[0]))
            waiting.end(_ns(queue[1]))
        span.set_attribute("vllm_omni.tokens", tokens)
        span.end()

    def transfer(self, source: str, target: str, times: tuple[float, float], nbytes: int) -> None:
        """All that went over an edge, from the first put to the last hand-over (monotonic)."""
        span = start_span(f"transfer {source} {target}", self._context, _ns(times[0]))
        span.set_attribute("vllm_omni.bytes", nbytes)
        span.end(_ns(times[1]))

    def end(self, outcome: str, error: str | None = None) -> None:
        """The request has ended; stages that had not are cut off."""
        for span in self._stages.values():
            span.end()
        self._root.set_attribute("vllm_omni.outcome", outcome)
        if error is not None:
            self._root.set_status(Status(StatusCode.ERROR, error))
        self._root.end()


def _ns(moment: float) -> int:
    """Wall clock, in ns, of a monotonic moment."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
