# SPDX-License-Identifier: Apache-2.0
"""Request ids, metrics and traces of a running server (REFERENCE.md 2.6)."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.sync.client import connect

from tests.entrypoints.conftest import MODEL, LiveServer
from tests.observability.collector import Span, SpanCollector

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

SPOKEN = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say something."}],
    "modalities": ["text", "audio"],
    "audio": {"format": "pcm16"},
    "max_tokens": 8,
    "ignore_eos": True,
    "sampling_params_list": [{}, {"temperature": 0, "max_tokens": 24}, {}],
}
PROCESS = re.compile(r"^\(([^)]*?) pid=(\d+)\)")


def samples(server: LiveServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All values of /metrics."""
    text = httpx.get(f"{server.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    """The sum of a metric's values that have these labels."""
    wanted = set(labels.items())
    hits = [v for (n, have), v in found.items() if n == name and wanted <= have]
    assert hits, f"no {name} with {labels}"
    return sum(hits)


def lines_about(server: LiveServer, request_id: str, seconds: float = 10) -> list[str]:
    """Lines with the id, once every kind of process has written one."""
    deadline = time.monotonic() + seconds
    while True:
        lines = [x for x in server.log.read_text(errors="replace").splitlines() if request_id in x]
        if len(processes(lines)) >= 4 or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)


def processes(lines: list[str]) -> set[str]:
    return {match[2] for line in lines if (match := PROCESS.match(line))}


def test_the_id_is_in_every_process(server: LiveServer) -> None:
    reply = server.chat(SPOKEN, headers={"X-Request-Id": "find-me.1"})
    assert reply.headers["x-request-id"] == "find-me.1"
    lines = lines_about(server, "find-me.1")
    # The server, the cores of thinker and talker, the worker of code2wav.
    assert len(processes(lines)) == 4, lines
    assert any('"POST /v1/chat/completions' in line for line in lines), "the access log"
    for stage in ("thinker", "talker", "code2wav"):
        assert any(f"goes to stage {stage}" in line for line in lines)
        assert any(f"enters the engine of stage {stage}" in line for line in lines)
        assert any(f"leaves the engine of stage {stage}" in line for line in lines)


def test_an_id_is_made(server: LiveServer) -> None:
    made = {server.chat(SPOKEN | {"modalities": ["text"]}).headers["x-request-id"] for _ in "ab"}
    assert len(made) == 2
    for request_id in made:
        assert re.fullmatch("[0-9a-f]{32}", request_id)
        assert lines_about(server, request_id, 1)


@pytest.mark.parametrize("path", ["/no/such", "/v1/chat/completions", "/health"])
def test_every_answer_has_an_id(server: LiveServer, path: str) -> None:
    reply = httpx.get(f"{server.url}{path}", headers={"X-Request-Id": "mine"})
    assert reply.headers.get_list("x-request-id") == ["mine"]


def test_ids_cannot_write_the_log(server: LiveServer) -> None:
    """Escape sequences, quotes and length; bytes that an HTTP client library would not send."""
    evil = b"\x1b[31m ERROR fake\t%s%n {x} " + b"e" * 5000 + b"\xff"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: "
            + evil
            + b"\r\n\r\n"
        )
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    head = answer.split(b"\r\n\r\n")[0]
    if b" 200 " in head.splitlines()[0]:  # else the server refused the header itself
        returned = re.search(rb"(?im)^x-request-id: (.*?)\r?$", head)[1]
        assert re.fullmatch(rb"[A-Za-z0-9._:-]{1,64}", returned)
    log = server.log.read_bytes()
    assert b"\x1b[31m ERROR fake" not in log
    assert b"e" * 100 not in log


def test_realtime_requests_are_found_by_the_sessions_id(server: LiveServer) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?model={MODEL}"
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    with connect(url, additional_headers={"X-Request-Id": "talk-1"}, legacy=True) as ws:
        assert ws.response.headers["x-request-id"] == "talk-1"
        ws.send(json.dumps({"type": "conversation.item.create", "item": item}))
        ws.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 2}}))
        while json.loads(ws.recv(timeout=60))["type"] != "response.done":
            pass
    assert len(processes(lines_about(server, "talk-1"))) == 4


def test_vllms_metrics_of_every_stage_and_replica(server: LiveServer) -> None:
    for _ in range(2):
        server.chat(SPOKEN)
    found = samples(server)
    places = {("thinker", "0"), ("talker", "0"), ("talker", "1")}
    for stage, replica in places:
        assert value(found, "vllm:kv_cache_usage_perc", stage=stage, replica=replica) >= 0
        assert value(found, "vllm:num_requests_running", stage=stage, replica=replica) == 0
    assert value(found, "vllm:generation_tokens_total", stage="talker") >= 48
    assert value(found, "vllm:request_success_total", stage="thinker") >= 2
    named = {dict(labels).get("model_name") for (n, labels) in found if n.startswith("vllm:")}
    assert named - {None} == {MODEL}, "the name that clients use"
    labelled = {dict(labels).keys() >= {"engine"} for (n, labels) in found if n.startswith("vllm:")}
    assert labelled == {False}, "`engine` has become `stage` and `replica`"


def test_pipeline_metrics(server: LiveServer) -> None:
    server.chat(SPOKEN)
    before = samples(server)
    reply = server.chat(SPOKEN).json()
    after = samples(server)

    def grown(name: str, **labels: str) -> float:
        name = f"vllm_omni:{name}"
        return value(after, name, **labels) - value(before, name, **labels)

    seconds = reply["choices"][0]["audio_metadata"]["frame_count"] / 24_000
    assert grown("requests_success_total", finished_reason="stop") == 1
    assert grown("prompt_tokens_total") == reply["usage"]["prompt_tokens"]
    assert grown("generation_tokens_total") == reply["usage"]["completion_tokens"]
    assert grown("e2e_request_latency_s_count") == 1
    assert grown("request_queue_wait_s_count") == 1
    for stage, kind in (("thinker", "ar"), ("talker", "ar"), ("code2wav", "diffusion")):
        assert grown("stage_gen_time_s_count", stage=stage, stage_type=kind) == 1
    for stage in ("thinker", "talker"):
        assert grown("stage_in_queue_s_count", stage=stage) == 1
    assert grown("audio_ttfp_s_count") == grown("audio_rtf_count") == 1
    assert grown("audio_duration_s_sum") == pytest.approx(seconds)
    assert grown("audio_frames_total") == round(seconds * 24_000)
    assert grown("audio_underrun_s_count") == 1
    assert grown("speech_stream_completed_total") == 1
    for source, target in (("thinker", "talker"), ("talker", "code2wav"), ("code2wav", "client")):
        edge = {"from_stage": source, "to_stage": target}
        assert grown("transfer_size_bytes_sum", **edge) > 0
        assert 0 < grown("transfer_tx_s_sum", **edge) < 60
        assert 0 <= grown("transfer_in_flight_s_sum", **edge) < 60
    assert grown("transfer_rx_s_count", from_stage="talker", to_stage="code2wav") == 1
    assert grown("transfer_rx_s_count", from_stage="code2wav", to_stage="client") == 1
    assert value(after, "vllm_omni:num_requests_running") == 0
    for stage, replica in (("thinker", "0"), ("talker", "0"), ("talker", "1"), ("code2wav", "0")):
        assert value(after, "vllm_omni:stage_queue_depth", stage=stage, replica=replica) == 0
    assert value(after, "vllm_omni:stage_live_replicas", stage="talker") == 2
    for loop in ("api", "orchestrator"):
        assert value(after, "vllm_omni:event_loop_lag_s_count", loop=loop) > 0


def test_requests_that_run_are_counted(server: LiveServer) -> None:
    body = SPOKEN | {"max_tokens": 120}
    peaks: dict[str, float] = {}
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.chat, body) for _ in range(8)]
        while not all(each.done() for each in running):
            found = samples(server)
            for name in ("num_requests_running", "stage_waiting_requests", "stage_queue_depth"):
                peak = value(found, f"vllm_omni:{name}")
                peaks[name] = max(peak, peaks.get(name, 0))
    assert all(each.result().is_success for each in running)
    assert peaks["num_requests_running"] > 4  # more than one stage has room for
    assert peaks["stage_waiting_requests"] > 0
    assert peaks["stage_queue_depth"] > 4
    assert value(samples(server), "vllm_omni:num_requests_running") == 0


def test_requests_whose_client_leaves_are_counted(server: LiveServer) -> None:
    def aborts() -> float:
        key = ("vllm_omni:requests_success_total", frozenset({("finished_reason", "abort")}))
        return samples(server).get(key, 0)

    before = aborts()
    body = SPOKEN | {"max_tokens": 400, "sampling_params_list": None, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    deadline = time.monotonic() + 20
    while aborts() == before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert aborts() == before + 1
    assert value(samples(server), "vllm_omni:num_requests_running") == 0


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


def test_one_trace_over_all_processes(server: LiveServer, spans: SpanCollector) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-Id": "traced"}
    assert server.chat(SPOKEN, headers=headers).is_success
    wanted = {
        "request",
        "stage thinker",
        "stage talker",
        "stage code2wav",
        "queue",
        "transfer thinker talker",
        "transfer talker code2wav",
        "transfer code2wav client",
        "run code2wav",
        "llm_request",
    }
    trace = spans.trace(TRACE_ID, lambda found: wanted <= {span.name for span in found})
    by_name: dict[str, list[Span]] = {}
    for span in trace:
        by_name.setdefault(span.name, []).append(span)
    assert by_name.keys() == wanted
    (request,) = by_name["request"]
    assert request.parent_id == PARENT_ID
    assert "traced" in request.attributes["gen_ai.request.id"]
    assert request.attributes["vllm_omni.outcome"] == "stop"
    stages = {name: by_name[f"stage {name}"][0] for name in ("thinker", "talker", "code2wav")}
    for name, span in stages.items():
        assert span.parent_id == request.span_id, name
        assert request.start <= span.start <= span.end <= request.end + 10_000_000, name
    in_ar = {stages["thinker"].span_id, stages["talker"].span_id}
    assert {span.parent_id for span in by_name["llm_request"]} == in_ar
    assert {span.parent_id for span in by_name["queue"]} == in_ar
    (run,) = by_name["run code2wav"]
    assert run.parent_id == stages["code2wav"].span_id
    assert run.process != request.process, "it comes from the worker process"
    for name in wanted:
        if name.startswith("transfer"):
            assert by_name[name][0].parent_id == request.span_id
            assert int(by_name[name][0].attributes["vllm_omni.bytes"]) > 0


def test_a_request_without_a_parent_has_its_own_trace(
    server: LiveServer, spans: SpanCollector
) -> None:
    server.chat(SPOKEN, headers={"X-Request-Id": "orphan"})
    deadline = time.monotonic() + 20
    found: list[Span] = []
    while not found and time.monotonic() < deadline:
        found = [s for s in spans.spans if "orphan" in s.attributes.get("gen_ai.request.id", "")]
        found = [s for s in found if s.name == "request"]
        time.sleep(0.1)
    (request,) = found
    assert request.parent_id == ""
    assert request.trace_id != TRACE_ID
