# SPDX-License-Identifier: Apache-2.0
"""`WS /v1/realtime`: OpenAI's client talks, errors have their codes (A-48), limits hold."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import RealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.entrypoints.conftest import (
    IDLE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_SESSIONS,
    MODEL,
    LiveServer,
)

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

GREEDY = {"temperature": 0, "max_output_tokens": 8}
SAME_SPEECH = {"sampling_params_list": [{}, {"temperature": 0, "max_tokens": 24}, {}]}
QUESTION = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Say something."}],
}


@contextmanager
def raw(server: LiveServer, query: str = "") -> Iterator[ClientConnection]:
    """A session without a client library; `session.created` has been read."""
    url = f"ws://127.0.0.1:{server.port}/v1/realtime{query}"
    with connect(url, max_size=None, legacy=True) as socket:
        yield socket


@pytest.fixture
def session(server: LiveServer) -> Iterator[ClientConnection]:
    with raw(server) as socket:
        assert received(socket)["type"] == "session.created"
        yield socket


def received(socket: ClientConnection) -> dict[str, Any]:
    return json.loads(socket.recv(timeout=60))


def said(socket: ClientConnection, event: dict[str, Any] | str | bytes) -> dict[str, Any]:
    """The answer to an event."""
    socket.send(event if isinstance(event, str | bytes) else json.dumps(event))
    return received(socket)


def closed(socket: ClientConnection) -> tuple[int, list[dict[str, Any]]]:
    """The close code, and what was sent before."""
    events = []
    with pytest.raises(ConnectionClosed) as caught:
        while True:
            events.append(received(socket))
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, events


def response(connection: RealtimeConnection) -> list[RealtimeServerEvent]:
    """All events up to the end of a response."""
    events = []
    for event in connection:
        events.append(event)
        assert event.type != "error", event
        if event.type == "response.done":
            return events
    raise AssertionError("the connection ended")


def joined(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == kind)


def sound(seconds: float, rate: int = 24_000) -> str:
    samples = np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate) * 8000
    return base64.b64encode(samples.astype("<i2").tobytes()).decode()


def test_openais_client_gets_text(client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something."}],
        max_tokens=8,
        temperature=0,
    )
    with client.realtime.connect(model=MODEL) as connection:
        connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        connection.conversation.item.create(item=QUESTION)
        connection.response.create(response=GREEDY)
        events = response(connection)
    text = joined(events, "response.output_text.delta")
    assert text == expected.choices[0].message.content
    assert [e.type for e in events[:5]] == [
        "session.created",
        "session.updated",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]
    assert [e.type for e in events[-5:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    done = events[-1].response
    assert done.status == "incomplete"
    assert done.status_details.reason == "max_output_tokens"
    assert done.output[0].content[0].text == text
    assert done.usage.output_tokens == 8


def test_openais_client_gets_sound(client: openai.OpenAI) -> None:
    whole = (
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Say something."}],
            max_tokens=8,
            temperature=0,
            modalities=["audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            extra_body=SAME_SPEECH,
        )
        .choices[0]
        .message.audio
    )
    with client.realtime.connect(model=MODEL) as connection:
        audio = {"output": {"voice": "ethan", "format": {"type": "audio/pcm", "rate": 24000}}}
        connection.session.update(session={"type": "realtime", "audio": audio})
        connection.conversation.item.create(item=QUESTION)
        connection.response.create(response=GREEDY | SAME_SPEECH)
        events = response(connection)
    pieces = [e.delta for e in events if e.type == "response.output_audio.delta"]
    heard = np.frombuffer(b"".join(map(base64.b64decode, pieces)), "<i2").astype(int)
    expected = np.frombuffer(base64.b64decode(whole.data), "<i2").astype(int)
    assert len(heard) == len(expected) > 0
    assert np.abs(heard - expected).max() <= 1
    transcript = joined(events, "response.output_audio_transcript.delta")
    assert transcript == whole.transcript
    assert events[-1].response.output[0].content[0].transcript == transcript


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_spoken_question_and_a_second_turn(client: openai.OpenAI, rate: int) -> None:
    with client.realtime.connect(model=MODEL) as connection:
        audio = {"input": {"format": {"type": "audio/pcm", "rate": rate}, "turn_detection": None}}
        connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "audio": audio}
        )
        for _ in range(4):
            connection.input_audio_buffer.append(audio=sound(0.25, rate))
        connection.input_audio_buffer.commit()
        connection.response.create(response=GREEDY)
        first = response(connection)
        kinds = [event.type for event in first]
        assert kinds.index("input_audio_buffer.committed") < kinds.index("response.created")
        tokens = first[-1].response.usage.input_tokens
        connection.conversation.item.create(item=QUESTION)
        connection.response.create(response=GREEDY)
        second = response(connection)
        assert second[-1].response.usage.input_tokens > tokens, "the first turn is part of it"


def test_audio_is_the_same_at_both_rates(client: openai.OpenAI) -> None:
    """One second is one second: as many tokens whatever the rate it comes at."""
    tokens = set()
    for rate in (16_000, 24_000):
        with client.realtime.connect(model=MODEL) as connection:
            audio = {"input": {"format": {"type": "audio/pcm", "rate": rate}}}
            connection.session.update(
                session={"type": "realtime", "output_modalities": ["text"], "audio": audio}
            )
            connection.input_audio_buffer.append(audio=sound(1.0, rate))
            connection.input_audio_buffer.commit()
            connection.response.create(response=GREEDY)
            tokens.add(response(connection)[-1].response.usage.input_tokens)
    assert len(tokens) == 1


def test_cancel(server: LiveServer, client: openai.OpenAI) -> None:
    with client.realtime.connect(model=MODEL) as connection:
        connection.conversation.item.create(item=QUESTION)
        connection.response.create(response={"output_modalities": ["text"]})
        for event in connection:
            if event.type == "response.output_text.delta":
                break
        connection.response.cancel()
        done = response(connection)[-1].response
        assert done.status in ("cancelled", "incomplete", "completed")
        connection.response.create(response=GREEDY)
        assert response(connection)[-1].response.status == "incomplete"


def test_leaving_aborts(server: LiveServer, client: openai.OpenAI) -> None:
    for _ in range(3):
        with client.realtime.connect(model=MODEL) as connection:
            connection.conversation.item.create(item=QUESTION)
            connection.response.create(response={})
            for event in connection:
                if event.type == "response.created":
                    break
    deadline = time.monotonic() + 10
    while server.running_requests() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.running_requests() == 0
    server.assert_answers()


def test_buffer_is_cleared(session: ClientConnection) -> None:
    assert said(session, {"type": "session.update", "model": MODEL})["type"] == "session.updated"
    session.send(json.dumps({"type": "input_audio_buffer.append", "audio": sound(0.1)}))
    cleared = said(session, {"type": "input_audio_buffer.clear"})
    assert cleared["type"] == "input_audio_buffer.cleared"
    error = said(session, {"type": "input_audio_buffer.commit"})["error"]
    assert error["code"] == "input_audio_buffer_commit_empty"


UPDATE = {"type": "session.update"}
APPEND = {"type": "input_audio_buffer.append"}
ITEM = {"type": "conversation.item.create"}
WRONG: dict[str, tuple[dict[str, Any] | str | bytes, str, str | None, str]] = {
    # The six of A-48.
    "json": ("{", "invalid_json", None, "Invalid JSON"),
    "no model": (UPDATE, "invalid_event", "model", "Missing required field"),
    "model": (UPDATE | {"model": "no-such"}, "model_not_found", "model", "does not exist"),
    "commit": (
        {"type": "input_audio_buffer.commit"},
        "model_not_validated",
        "model",
        "session.update",
    ),
    "event": ({"type": "no.such"}, "unknown_event", "type", "Unknown event type"),
    "base64": (APPEND | {"audio": "***"}, "invalid_audio", "audio", "Invalid audio data"),
    # And beside them.
    "half a sample": (APPEND | {"audio": "AAAA"}, "invalid_audio", "audio", "Invalid audio data"),
    "no type": ({}, "invalid_event", "type", "Missing required field"),
    "no object": ("[1]", "invalid_event", "type", "JSON object"),
    "binary": (b"\xff\xfe", "invalid_json", None, "Invalid JSON"),
    "deep": ("[" * 100_000, "invalid_json", None, "Invalid JSON"),
    "no audio": (APPEND, "invalid_event", "audio", "Missing required field"),
    "vad": (
        UPDATE | {"model": MODEL, "session": {"turn_detection": {"type": "server_vad"}}},
        "invalid_event",
        "session.turn_detection",
        "not supported",
    ),
    "voice": (
        UPDATE | {"model": MODEL, "session": {"voice": "nobody"}},
        "invalid_event",
        "audio.voice",
        "unknown voice",
    ),
    "modality": (
        UPDATE | {"model": MODEL, "session": {"output_modalities": ["smell"]}},
        "invalid_event",
        "session.output_modalities.0",
        "text",
    ),
    "item": (
        ITEM | {"item": QUESTION | {"content": [{"type": "input_text"}]}},
        "invalid_event",
        "item.content.0.text",
        "Missing required field",
    ),
    "response": ({"type": "response.create"}, "model_not_validated", "model", "session.update"),
    "no response": (
        {"type": "response.cancel"},
        "response_cancel_not_active",
        "response_id",
        "no such response",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_requests(session: ClientConnection, name: str) -> None:
    """A-48: the code, the field, the words; the event's id comes back; the session goes on."""
    event, code, param, words = WRONG[name]
    if isinstance(event, dict):
        event = event | {"event_id": "mine"}
    answer = said(session, event)
    assert answer["type"] == "error", answer
    assert answer["code"] == answer["error"]["code"] == code
    assert answer["error"].get("param") == param
    assert words in answer["error"]["message"]
    assert answer["error"].get("event_id") == ("mine" if isinstance(event, dict) else None)
    assert said(session, UPDATE | {"model": MODEL})["type"] == "session.updated"


def test_wrong_model_in_the_url(server: LiveServer) -> None:
    with raw(server, "?model=no-such") as socket:
        assert received(socket)["type"] == "session.created"
        assert received(socket)["code"] == "model_not_found"
        assert said(socket, UPDATE | {"model": MODEL})["type"] == "session.updated"


def test_a_response_that_fails_leaves_the_session(session: ClientConnection) -> None:
    said(session, UPDATE | {"model": MODEL})
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    added = said(session, ITEM | {"item": QUESTION | {"id": "bad", "content": [image]}})
    assert added["type"] == "conversation.item.added"
    assert received(session)["type"] == "conversation.item.done"
    assert said(session, {"type": "response.create"})["type"] == "response.created"
    done = received(session)["response"]
    assert done["status"] == "failed"
    assert done["status_details"]["error"]["code"] == "400"
    assert "image" in done["status_details"]["error"]["message"]
    deleted = said(session, {"type": "conversation.item.delete", "item_id": "bad"})
    assert deleted["type"] == "conversation.item.deleted"


def test_one_response_at_a_time(session: ClientConnection) -> None:
    said(session, UPDATE | {"model": MODEL})
    said(session, ITEM | {"item": QUESTION})
    received(session)
    assert said(session, {"type": "response.create"})["type"] == "response.created"
    session.send(json.dumps({"type": "response.create"}))
    while (event := received(session))["type"] != "error":
        assert event["type"] != "response.done"
    assert event["code"] == "conversation_already_has_active_response"


def test_large_frames(server: LiveServer, session: ClientConnection) -> None:
    session.send(" " * (MAX_FRAME_BYTES + 1))
    code, events = closed(session)
    assert code == 1009
    assert [event["code"] for event in events] == ["frame_too_large"]
    with raw(server) as socket:
        socket.send(" " * (2 * MAX_FRAME_BYTES + 1))
        assert closed(socket)[0] == 1009


def test_too_many_events(session: ClientConnection) -> None:
    for _ in range(400):
        session.send(json.dumps({"type": "input_audio_buffer.clear"}))
    code, events = closed(session)
    assert code == 1008
    assert events[-1]["code"] == "rate_limit_exceeded"
    assert 200 <= len(events) < 400


def test_idle(session: ClientConnection) -> None:
    begin = time.monotonic()
    code, events = closed(session)
    assert code == 1001
    assert events[-1]["code"] == "idle_timeout"
    assert IDLE_TIMEOUT_S - 0.5 < time.monotonic() - begin < IDLE_TIMEOUT_S + 5


def test_too_many_sessions(server: LiveServer) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/realtime"
    sockets = [connect(url, legacy=True) for _ in range(MAX_SESSIONS)]
    try:
        for socket in sockets:
            assert received(socket)["type"] == "session.created"
        with connect(url, legacy=True) as one_more:
            code, events = closed(one_more)
            assert code == 1013
            assert [event["code"] for event in events] == ["too_many_sessions"]
    finally:
        for socket in sockets:
            socket.close()
    with raw(server) as socket:
        assert received(socket)["type"] == "session.created"
