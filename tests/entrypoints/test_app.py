# SPDX-License-Identifier: Apache-2.0
"""The application around the routes: vLLM's routes stay, requests end with their client."""

import json
import time

import httpx
import pytest

from tests.entrypoints.conftest import MODEL, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Talk on."}],
    "max_tokens": 400,
    "ignore_eos": True,
}


def wait_until_idle(server: LiveServer, seconds: float) -> float:
    """How long it took until the server answers as fast as an idle one does."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        begin = time.monotonic()
        server.assert_answers()
        if time.monotonic() - begin < 1:
            break
    return time.monotonic() - start


def test_vllms_routes_stay(server: LiveServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    upstream = {
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/version",
    }
    documented = upstream - {"/metrics"}  # mounted, not a route
    assert documented <= set(document["paths"])
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    assert reference.endswith("/OmniChatCompletionRequest")
    assert {"modalities", "audio", "messages"} <= set(
        document["components"]["schemas"]["OmniChatCompletionRequest"]["properties"]
    )
    completion = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=completion, timeout=60).is_success
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "hi"}).is_success
    assert httpx.get(f"{server.url}/metrics").is_success
    reply = httpx.post(f"{server.url}/v1/audio/speech", json={"input": "Hi."})
    assert reply.status_code == 404
    assert "use /v1/chat/completions" in reply.json()["error"]["message"]


@pytest.mark.parametrize("route", ["completions", "chat/completions", "responses"])
def test_vllms_routes_have_the_deployments_sampling_defaults(
    server: LiveServer, route: str
) -> None:
    """The server was started with a temperature of 0: without it, answers would differ."""
    fields = {
        "completions": {"prompt": "hi", "max_tokens": 16, "ignore_eos": True},
        "chat/completions": {"messages": LONG["messages"], "max_tokens": 16, "ignore_eos": True},
        "responses": {"input": "hi", "max_output_tokens": 16},
    }[route]

    def answer(**more: float) -> str:
        body = {"model": MODEL, **fields, **more}
        reply = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60).json()
        return str(reply["choices"] if "choices" in reply else reply["output"][0]["content"])

    assert answer() == answer() == answer(temperature=0)


def test_an_earlier_refusal_is_text_to_the_model(server: LiveServer) -> None:
    """Found by fuzzing: vLLM reads the text of an earlier answer's first part."""
    refusal = {"type": "refusal", "refusal": "No."}
    answer = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    question = {"role": "user", "content": "why?"}
    for content, status in (([refusal], 200), ([], 400)):
        turns = [question, {**answer, "content": content}, question]
        body = {"model": MODEL, "input": turns, "max_output_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)
        assert reply.status_code == status, reply.text
    assert reply.json()["error"]["param"] == "input.1.content"


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_server(
    server: LiveServer, modalities: list[str], stream: bool
) -> None:
    body = {**LONG, "modalities": modalities, "stream": stream}
    for _ in range(6):  # more than the server runs at once
        with httpx.Client(base_url=server.url, timeout=0.5 if not stream else 60) as client:
            try:
                with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    next(reply.iter_lines())
            except httpx.ReadTimeout:
                assert not stream
    assert wait_until_idle(server, 20) < 20


def test_stream_ends_with_done(server: LiveServer) -> None:
    body = {**LONG, "max_tokens": 3, "stream": True, "modalities": ["text", "audio"]}
    lines = server.chat(body).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("modality" in chunk for chunk in chunks)
