# SPDX-License-Identifier: Apache-2.0
"""A receiver of OpenTelemetry spans (OTLP over HTTP) for tests."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Span(NamedTuple):
    """A span as it arrived; ids in hex, times in ns."""

    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, str]
    failed: bool


class SpanCollector:
    """Listens on a free port; a context manager."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(body)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._changed = threading.Condition()

    @property
    def endpoint(self) -> str:
        """For `--otlp-traces-endpoint`."""
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def trace(
        self, trace_id: str, complete: Callable[[list[Span]], bool], timeout: float = 30
    ) -> list[Span]:
        """The spans of a trace, once they are complete."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id == trace_id]

        with self._changed:
            self._changed.wait_for(lambda: complete(found()), timeout)
            return found()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.append(_span(names.get("vllm.process_name", ""), span))
            self._changed.notify_all()


def _span(process: str, span: object) -> Span:
    values = {a.key: a.value for a in span.attributes}
    return Span(
        process,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {k: v.string_value or str(v.int_value) for k, v in values.items()},
        span.status.code == 2,
    )
