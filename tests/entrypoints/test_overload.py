# SPDX-License-Identifier: Apache-2.0
"""More than a server can do: refused politely, ended in time, and never kept in memory."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.entrypoints.conftest import MODEL, SERVE_FLAGS, THREADS, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

REQUEST_TIMEOUT_S = 16
# Three stages that run one request each: three slots. Two places to wait, of which one client has
# one if it is alone.
TIGHT = (
    *("--max-num-seqs", "1"),
    *("--max-model-len", "16384"),
    *("--kv-cache-memory-bytes", "64000000"),
    *("--max-num-queued-reqs", "5"),
    *("--request-timeout", str(REQUEST_TIMEOUT_S)),
    *("--slow-client-timeout", "2"),
    *("--max-stream-buffer-bytes", "100000"),
    *("--max-logprobs", "60"),
)
ENDLESS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Talk on."}],
    "max_tokens": 15000,
    "temperature": 1,
    "ignore_eos": True,
}
# Few tokens fill a connection's buffers, however slow the machine is.
LONG_EVENTS = {"max_tokens": 480, "logprobs": True, "top_logprobs": 60}
SHORT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tight(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("tight") / "log.txt"
    live = LiveServer(checkpoint, [*SERVE_FLAGS, *TIGHT], log=log, env=THREADS)
    live.start()
    yield live
    live.stop_cleanly()


def metric(server: LiveServer, name: str) -> float:
    """The value, over all labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", name + "{"))
    )


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post(CHAT, json=body, timeout=60)


async def test_too_many_requests_are_refused_and_no_client_crowds_out_another(
    tight: LiveServer,
) -> None:
    def from_address(host: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(local_address=host)
        return httpx.AsyncClient(base_url=tight.url, transport=transport)

    rejected = metric(tight, "vllm_omni:requests_rejected_total")
    async with from_address("127.0.0.1") as greedy, from_address("127.0.0.2") as modest:
        flood = [asyncio.create_task(ask(greedy, ENDLESS)) for _ in range(12)]
        done, pending = await asyncio.wait(flood, timeout=2)
        refused = [task.result() for task in done]
        assert len(refused) == 12 - 3 - 1
        for reply in refused:
            assert reply.status_code == 429
            assert 1 <= int(reply.headers["retry-after"]) <= 600
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("RateLimitError", "queue_full")
        assert metric(tight, "vllm_omni:num_requests_waiting") == 1
        assert (await greedy.get("/health")).status_code == 200
        theirs = asyncio.create_task(ask(modest, SHORT))
        statuses = {(await task).status_code for task in pending}
        assert statuses <= {200, 504}
        assert (await theirs).status_code != 429
    assert metric(tight, "vllm_omni:requests_rejected_total") == rejected + 8
    tight.assert_answers()


async def test_openais_client_knows_the_error_and_comes_again(tight: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=tight.url) as client:
        flood = [asyncio.create_task(ask(client, ENDLESS)) for _ in range(4)]
        await asyncio.sleep(0.5)
        url = f"{tight.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as impatient:
            with pytest.raises(openai.RateLimitError):
                await impatient.chat.completions.create(**SHORT)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=10) as patient:
            for task in flood[:3]:
                task.cancel()
            reply = await patient.chat.completions.create(**SHORT)
            assert reply.choices[0].finish_reason
        flood[3].cancel()
    wait_until(lambda: tight.running_requests() == 0, 10)


async def test_a_request_ends_at_its_deadline(tight: LiveServer) -> None:
    before = metric(tight, "vllm_omni:requests_deadline_exceeded_total")
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=tight.url) as client:
        completion = {**ENDLESS, "prompt": "Talk on.", "stream": True}
        del completion["messages"]
        streamed, whole, vllms = await asyncio.gather(
            ask(client, {**ENDLESS, "stream": True}),
            ask(client, ENDLESS),
            client.post("/v1/completions", json=completion, timeout=60),
        )
    took = time.monotonic() - began
    assert REQUEST_TIMEOUT_S - 0.1 < took < REQUEST_TIMEOUT_S + 5
    assert whole.status_code == 504
    assert whole.json()["error"]["type"] == "GatewayTimeoutError"
    events = streamed.text.strip().split("\n\n")
    if streamed.status_code == 200:
        errors = [json.loads(e.removeprefix("data: ")) for e in events if '"error"' in e]
        assert [each["error"]["code"] for each in errors] == [504]
        assert errors[0]["error"]["type"] == "GatewayTimeoutError"
        assert events[-1] == "data: [DONE]"
    assert '"code": 504' in vllms.text, "vLLM's own routes say it too"
    assert metric(tight, "vllm_omni:requests_deadline_exceeded_total") == before + 3
    wait_until(lambda: tight.running_requests() == 0, 5)
    tight.assert_answers()


def test_a_client_that_stops_reading_is_let_go(tight: LiveServer) -> None:
    """With a real socket: the kernel's buffers fill up, then uvicorn's, then ours."""
    before = metric(tight, "vllm_omni:requests_slow_client_total")
    body = json.dumps({**ENDLESS, **LONG_EVENTS, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", tight.port))
        client.sendall(head.encode() + body)
        got = client.recv(200)
        assert got.startswith(b"HTTP/1.1 200")
        wait_until(
            lambda: metric(tight, "vllm_omni:requests_slow_client_total") > before,
            REQUEST_TIMEOUT_S + 2,
        )
        wait_until(lambda: tight.running_requests() == 0, 15)
        tight.assert_answers()
        client.settimeout(1)
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := client.recv(1 << 20):
                got = got[-1000:] + part
    assert b"[DONE]" not in got or b'"RequestTimeoutError"' in got


async def test_equal_request_ids_are_no_error(server: LiveServer) -> None:
    """A client that retries sends its id again."""
    headers = {"X-Request-Id": "the-same"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers) as client:
        replies = await asyncio.gather(*(ask(client, SHORT) for _ in range(4)))
    assert [reply.status_code for reply in replies] == [200] * 4
    assert len({reply.text.split('"created"')[0] for reply in replies}) == 1


def test_loop_lag_is_measured_while_requests_run(server: LiveServer) -> None:
    before = metric(server, "vllm_omni:event_loop_lag_s_count")
    assert server.chat({**SHORT, "max_tokens": 200, "ignore_eos": True}).status_code == 200
    assert metric(server, "vllm_omni:event_loop_lag_s_count") > before
