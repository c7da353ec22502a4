# SPDX-License-Identifier: Apache-2.0
"""A server that tells everything it can: logs of requests, traces, two replicas of a stage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.conftest import SERVE_FLAGS, THREADS, LiveServer
from tests.observability.collector import SpanCollector
from vllm_omni.testing.tiny import build


@pytest.fixture(scope="session")
def spans() -> Iterator[SpanCollector]:
    with SpanCollector() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(spans: SpanCollector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The server; at the end it must stop cleanly."""
    folder = tmp_path_factory.mktemp("observed")
    checkpoint: Path = build("qwen3_omni_moe", folder / "qwen3_omni_moe")
    flags = (
        *SERVE_FLAGS,
        "--enable-log-requests",
        *("--otlp-traces-endpoint", spans.endpoint),
        *("--stage-overrides", '{"talker": {"num_replicas": 2}}'),
    )
    env = {
        **THREADS,
        "VLLM_LOGGING_LEVEL": "INFO",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "300",
    }
    live = LiveServer(checkpoint, flags, log=folder / "log.txt", env=env)
    live.start()
    yield live
    live.stop_cleanly()
