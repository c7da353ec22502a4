# SPDX-License-Identifier: Apache-2.0
"""Whatever a WebSocket client sends: no crash, no hang, no leak, and the next session works.

`VLLM_OMNI_FUZZ_CASES` sets how many sessions are tried (10,000 before a release).
"""

import base64
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import hypothesis.strategies as st
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.sync.client import ClientConnection, connect

from tests.entrypoints.conftest import MODEL, LiveServer
from vllm_omni.entrypoints.openai.protocol.realtime import CLIENT_EVENTS

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

CASES = int(os.environ.get("VLLM_OMNI_FUZZ_CASES", "150"))
ANSWER_S = 20
"""Longest that a session may take to answer, on a loaded machine."""
DOCUMENTED_CLOSES = {1007, 1008, 1009}
"""Not UTF-8, too many events, too long a message: all the client's fault."""
IDLE = "idle_timeout"
MAX_GROWTH_BYTES = 60_000_000

_leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
_json = st.recursive(
    _leaf,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_pcm = st.binary(min_size=2, max_size=4000).map(lambda data: base64.b64encode(data).decode())
_text = {"type": "input_text", "text": "hi"}
_part = st.one_of(
    st.just(_text),
    _pcm.map(lambda audio: {"type": "input_audio", "audio": audio}),
    st.just({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}),
    st.fixed_dictionaries({"type": st.text(max_size=12), "text": _json}),
)
_item = st.fixed_dictionaries(
    {"type": st.just("message"), "role": st.sampled_from(["user", "assistant", "system", "dog"])},
    optional={"content": st.lists(_part, max_size=3), "id": st.text(max_size=70)},
)
_options = st.fixed_dictionaries(
    {},
    optional={
        "output_modalities": st.lists(st.sampled_from(["text", "audio", "smell"]), max_size=3),
        "voice": st.sampled_from(["Ethan", "nobody", ""]),
        "max_output_tokens": st.sampled_from([0, 1, 2, "inf", -1, 10**30]),
        "temperature": _leaf,
        "seed": _leaf,
        "instructions": st.text(max_size=20),
        "audio": _json,
        "sampling_params_list": _json,
    },
)
_update = st.fixed_dictionaries(
    {"type": st.just("session.update")},
    optional={"model": st.sampled_from([MODEL, "other", "", None, 3]), "session": _options},
)
_valid = st.one_of(
    _update,
    st.just({"type": "session.update", "model": MODEL}),
    st.fixed_dictionaries(
        {"type": st.just("input_audio_buffer.append"), "audio": _pcm | st.text(max_size=9) | _json}
    ),
    st.just({"type": "input_audio_buffer.commit"}),
    st.just({"type": "input_audio_buffer.clear"}),
    st.fixed_dictionaries({"type": st.just("conversation.item.create"), "item": _item}),
    st.fixed_dictionaries({"type": st.just("conversation.item.delete"), "item_id": _json}),
    st.fixed_dictionaries({"type": st.just("response.create"), "response": _options}),
    st.just({"type": "response.cancel"}),
)
_damaged = st.tuples(st.sampled_from(sorted(CLIENT_EVENTS)), st.dictionaries(st.text(), _json)).map(
    lambda pair: {**pair[1], "type": pair[0]}
)
_frame = st.one_of(
    _valid.map(json.dumps),
    _valid.map(json.dumps),
    _damaged.map(json.dumps),
    _json.map(json.dumps),
    st.text(max_size=50),
    st.binary(max_size=50),
)

_user = {"type": "message", "role": "user", "content": [_text]}
_READY = [
    json.dumps({"type": "session.update", "model": MODEL}),
    json.dumps({"type": "conversation.item.create", "item": _user}),
]
"""What comes before most responses that are made at all."""
_short = _options.map(lambda options: {**options, "max_output_tokens": 2})
_response = st.fixed_dictionaries({"type": st.just("response.create"), "response": _short})


def test_whatever_a_client_sends(server: LiveServer) -> None:
    seen: set[str] = set()
    process = psutil.Process(server.process.pid)
    server.assert_answers()
    before: list[tuple[int, int]] = []

    @hypothesis.given(
        frames=st.lists(_frame, max_size=6),
        response=st.none() | _response.map(json.dumps),
        leaves=st.booleans(),
    )
    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(frames: list[str | bytes], response: str | None, leaves: bool) -> None:
        if not before:
            before.append((process.memory_info().rss, process.num_fds()))
        url = f"ws://127.0.0.1:{server.port}/v1/realtime"
        with connect(url, legacy=True) as socket, _unless_it_dawdled():
            for frame in [*_READY, response, *frames] if response else frames:
                socket.send(frame)
            if not leaves:
                seen.update(_until_answered(socket))

    run()
    assert {"invalid_json", "invalid_event", "unknown_event"} <= seen
    assert "response.created" in seen
    _assert_idle(server)
    server.assert_answers()
    memory, descriptors = before[0]
    assert process.num_fds() <= descriptors + 8
    assert process.memory_info().rss < memory + MAX_GROWTH_BYTES
    with connect(f"ws://127.0.0.1:{server.port}/v1/realtime?model={MODEL}", legacy=True) as socket:
        socket.send(_READY[1])
        socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 2}}))
        while (event := json.loads(socket.recv(timeout=ANSWER_S)))["type"] != "response.done":
            assert event["type"] != "error", event


@contextmanager
def _unless_it_dawdled() -> Iterator[None]:
    """On a busy machine this client may stand still for longer than the server waits for it."""
    try:
        yield
    except ConnectionClosedOK as closed:
        assert closed.rcvd is not None and closed.rcvd.reason == IDLE, closed


def _until_answered(socket: ClientConnection) -> set[str]:
    """Everything up to the answer to one more event; an error that is the server's fails."""
    seen: set[str] = set()
    try:
        socket.send(json.dumps({"type": "are you there", "event_id": "last"}))
        while True:
            event: dict[str, Any] = json.loads(socket.recv(timeout=ANSWER_S))
            seen.add(event["type"])
            if event["type"] == "error":
                seen.add(event["code"])
                if event["error"].get("event_id") == "last":
                    return seen
            if event["type"] == "response.done" and event["response"]["status"] == "failed":
                error = event["response"]["status_details"]["error"]
                assert int(error["code"]) < 500, error
    except ConnectionClosed as closed:
        assert closed.rcvd is not None, closed
        assert closed.rcvd.code in DOCUMENTED_CLOSES or closed.rcvd.reason == IDLE, closed
    return seen


def _assert_idle(server: LiveServer) -> None:
    deadline = time.monotonic() + ANSWER_S
    while server.running_requests() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.running_requests() == 0, "a request outlived its session"
