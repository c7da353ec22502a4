# SPDX-License-Identifier: Apache-2.0
"""`WS /v1/audio/speech/stream`: text in pieces, sound in pieces, errors with codes, limits."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.entrypoints.speech import (
    FAILS_LATE,
    IS_REFUSED,
    NEVER_ENDS,
    RATE,
    SpeechServer,
    speech_server,
    spoken,
)
from vllm_omni.entrypoints.openai.speech import session as speech_session
from vllm_omni.media.audio_encode import to_int16
from vllm_omni.media.decode import decode_audio

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

IDLE_S = 1
FRAME_BYTES = 100_000
PCM = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
DONE = {"type": "input.done"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechServer]:
    flags = (
        *("--realtime-idle-timeout", str(IDLE_S)),
        *("--realtime-max-frame-bytes", str(FRAME_BYTES)),
        *("--realtime-max-sessions", "3"),
        *("--tts-max-input-length", "200"),
    )
    with speech_server(tmp_path_factory.mktemp("stream") / "voices", *flags) as it:
        yield it


@contextmanager
def session(server: SpeechServer, *events: Any) -> Iterator[ClientConnection]:
    url = f"ws://{server.address}/v1/audio/speech/stream"
    with connect(url, max_size=None, legacy=True) as socket:
        for event in events:
            send(socket, event)
        yield socket


def send(socket: ClientConnection, event: Any) -> None:
    socket.send(event if isinstance(event, str | bytes) else json.dumps(event))


def text(words: str) -> dict[str, str]:
    return {"type": "input.text", "text": words}


def until(socket: ClientConnection, kind: str) -> list[Any]:
    """All events and sound up to an event of that kind."""
    received: list[Any] = []
    while True:
        frame = socket.recv(timeout=20)
        received.append(json.loads(frame) if isinstance(frame, str) else frame)
        if not isinstance(frame, bytes) and received[-1]["type"] == kind:
            return received


def closed(socket: ClientConnection) -> tuple[int, list[Any]]:
    """The close code, and what was sent before."""
    received: list[Any] = []
    with pytest.raises(ConnectionClosed) as caught:
        while True:
            frame = socket.recv(timeout=20)
            received.append(json.loads(frame) if isinstance(frame, str) else frame)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, received


def sound(received: list[Any]) -> bytes:
    return b"".join(each for each in received if isinstance(each, bytes))


def starts(received: list[Any]) -> list[str]:
    events = [each for each in received if not isinstance(each, bytes)]
    return [each["sentence_text"] for each in events if each["type"] == "audio.start"]


def test_text_in_pieces_is_spoken_by_the_sentence(server: SpeechServer) -> None:
    with session(server, PCM | {"voice": "ryan", "non_streaming_mode": False}) as socket:
        for word in ("It co", "sts 3", ".14, ", "no", "w. And", " you? ...  "):
            send(socket, text(word))
        send(socket, DONE)
        received = until(socket, "session.done")
        assert starts(received) == ["It costs 3.14, now.", " And you?"]
        expected = to_int16(spoken("It costs 3.14, now.")).tobytes()
        assert sound(received) == expected + to_int16(spoken("And you?")).tobytes()
        assert received[-1]["total_sentences"] == 2
        assert received[0] | {"sample_rate": RATE, "format": "pcm"} == received[0]
        done = [each for each in received if not isinstance(each, bytes)][1]
        assert done | {"type": "audio.done", "total_bytes": len(expected), "error": False} == done
        send(socket, text("Again"))  # a sticky session: its settings stay
        send(socket, DONE)
        assert starts(until(socket, "session.done")) == ["Again"]
        send(socket, {"type": "session.close"})
        assert closed(socket)[0] == 1000
    asked = server.engine.asked[-1][0]
    assert (asked.voice, asked.non_streaming) == ("Ryan", False)  # row A-50


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        ({"split_granularity": "none"}, ["One two. Three four, five six seven."]),
        (
            {"split_granularity": "clause"},
            ["One two.", " Three four,", " five six seven."],
        ),
        ({"text_input_mode": "commitment"}, ["One two. Three", " four, five six seven."]),
    ],
)
def test_where_text_is_cut(server: SpeechServer, config: Any, pieces: list[str]) -> None:
    words = (text("One two. Three"), text(" four, five six seven."), {"type": "session.close"})
    with session(server, {"type": "session.config", **config}, *words) as socket:
        code, received = closed(socket)
    assert (code, starts(received)) == (1000, pieces)
    files = [each for each in received if isinstance(each, bytes)]
    assert len(files) == len(pieces)  # not `stream_audio`: a whole file for each piece
    for file, piece in zip(files, pieces, strict=True):
        assert len(decode_audio(file)[0]) == len(spoken(piece.strip()))


def test_errors_are_events_with_codes_and_the_session_goes_on(server: SpeechServer) -> None:
    wrong: list[tuple[Any, str, str | None]] = [
        ("{", "invalid_json", None),
        ('"\\ud800"', "invalid_json", None),
        ("[1]", "invalid_event", "type"),
        ({"type": "dance"}, "unknown_event", "type"),
        ({"type": "input.text"}, "invalid_event", "text"),
        (text("a\x00"), "invalid_event", "text"),
        (text("a") | {"txt": "b"}, "invalid_event", "txt"),
        (DONE | {"text": "b"}, "invalid_event", "text"),
        ({"type": "session.config", "stream": True}, "invalid_event", "stream"),
        ({"type": "session.config", "split_granularity": "word"}, "invalid_event", None),
        ({"type": "session.config", "speed": 77}, "invalid_event", "speed"),
        ({"type": "session.config", "voice": "nobody"}, "invalid_request", "voice"),
        ({"type": "session.config", "word_timestamps": True}, "invalid_request", "word_timestamps"),
        (
            {"type": "session.config", "extra_params": {"emotion": "rage"}},
            "invalid_request",
            "extra_params.emotion",
        ),
        ({"type": "session.config", "model": "gpt"}, "model_not_found", "model"),
        (text("x"), "invalid_event", "session.config"),  # its settings were refused
    ]
    with session(server) as socket:
        for event, code, param in wrong:
            send(socket, event)
            (error,) = until(socket, "error")
            assert error["error"]["code"] == code, error
            assert param is None or error["error"]["param"] == param
        send(socket, {"type": "session.config"})
        send(socket, text("x" * 70_000))
        assert until(socket, "error")[-1]["error"]["code"] == "session_full"
        for words in (f"{IS_REFUSED} at once.", f" {FAILS_LATE} it fails.", " Good."):
            send(socket, text(words))
        send(socket, DONE)
        received = until(socket, "session.done")
        events = [each for each in received if not isinstance(each, bytes)]
        ends = [each["error"] for each in events if each["type"] == "audio.done"]
        codes = [each["error"]["code"] for each in events if each["type"] == "error"]
        assert codes == ["invalid_request", "internal_error"]
        assert ends == [True, True, False] and len(sound(received)) > 44


def test_what_waits_is_bounded(server: SpeechServer) -> None:
    with session(server, PCM, text(f"{NEVER_ENDS} ends."), DONE) as socket:
        until(socket, "audio.start")
        for _ in range(8):
            send(socket, PCM)
            send(socket, text("More."))
            send(socket, DONE)
        assert until(socket, "error")[-1]["error"]["code"] == "session_full"
    server.wait_idle()
    with session(server, PCM, text(f"{NEVER_ENDS} ends."), DONE) as socket:
        until(socket, "audio.start")
        for _ in range(17):
            send(socket, text("a. " * 1333))
        assert until(socket, "error")[-1]["error"]["code"] == "session_full"
    server.wait_idle()


def test_settings_count_while_their_text_waits(server: SpeechServer) -> None:
    with session(server) as socket:
        for turn in range(12):
            for event in (PCM, text(f"Turn {turn}."), DONE):
                send(socket, event)
            assert starts(until(socket, "session.done")) == [f"Turn {turn}."]


@pytest.mark.parametrize("bad", [{"voice": "nobody"}, {"speed": 99}, {"voice": 3}])
def test_text_is_not_spoken_by_the_settings_before(server: SpeechServer, bad: Any) -> None:
    with session(server, PCM | {"voice": "ryan"}, PCM | bad, text("Hello."), DONE) as socket:
        received = until(socket, "session.done")
        assert [each["type"] for each in received] == ["error", "error", "session.done"]
        for event in (PCM, text("Hello."), DONE):
            send(socket, event)
        assert starts(until(socket, "session.done")) == ["Hello."]


@pytest.mark.parametrize(
    "unread", ['{"type": "session.config", "voice": "ryan"', '{"voice": "ryan"}', "[]"]
)
def test_text_after_what_may_have_been_settings_waits_for_some(
    server: SpeechServer, unread: str
) -> None:
    with session(server, PCM, unread, text("Hello."), DONE) as socket:
        received = until(socket, "session.done")
        assert [each["type"] for each in received] == ["error", "error", "session.done"]


def test_a_text_of_all_that_may_wait_can_end(
    server: SpeechServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 4096  # of what may wait: more takes half a minute to speak
    monkeypatch.setattr(speech_session, "MAX_WAITING", most)
    with session(server, PCM, text("x" * most), {"type": "session.close"}) as socket:
        code, received = closed(socket)
    assert code == 1000
    assert sum(map(len, starts(received))) == most


def test_null_is_not_sent(server: SpeechServer) -> None:
    unset = {"split_granularity": None, "stream_audio": None, "text_input_mode": None}
    with session(server, {"type": "session.config"} | unset, text("Hello."), DONE) as socket:
        assert starts(until(socket, "session.done")) == ["Hello."]


def test_a_model_that_is_none(server: SpeechServer) -> None:
    url = f"ws://{server.address}/v1/audio/speech/stream?model={'a' * 5000}"
    with connect(url, legacy=True) as socket:
        assert until(socket, "error")[-1]["error"]["param"] == "model"


def test_long_text_without_a_mark_is_cut(server: SpeechServer) -> None:
    with session(server, PCM, text("word " * 100), DONE) as socket:
        received = until(socket, "session.done")
    assert "".join(starts(received)).strip() == ("word " * 100).strip()
    assert max(map(len, starts(received))) <= 200


def test_a_client_that_vanishes_or_closes_ends_what_is_spoken(server: SpeechServer) -> None:
    with session(server, PCM, text(f"{NEVER_ENDS} ends."), DONE) as socket:
        until(socket, "audio.start")
        socket.socket.close()
    with session(server, text(f"{NEVER_ENDS} ends."), DONE) as socket:
        while not server.engine.open:
            time.sleep(0.01)
    server.wait_idle()


def test_limits_close_with_a_code(server: SpeechServer) -> None:
    with session(server) as socket:  # stalls
        code, (event,) = closed(socket)
        assert (code, event["error"]["code"]) == (1001, "idle_timeout")
    with session(server, text("x" * (FRAME_BYTES + 1))) as socket:
        code, (event,) = closed(socket)
        assert (code, event["error"]["code"]) == (1009, "frame_too_large")
    with session(server) as socket:  # floods
        try:
            for _ in range(5000):
                send(socket, text("."))
        except ConnectionClosed:
            pass
        code, events = closed(socket)
        assert (code, events[-1]["error"]["code"]) == (1008, "rate_limit_exceeded")
    with session(server), session(server), session(server), session(server) as fourth:
        code, (event,) = closed(fourth)
        assert (code, event["error"]["code"]) == (1013, "too_many_sessions")
    with session(server, PCM, text("Fine."), DONE) as socket:
        assert sound(until(socket, "session.done"))


def test_a_page_of_another_site_is_refused(server: SpeechServer, tmp_path: Path) -> None:
    url = f"ws://{server.address}/v1/audio/speech/stream"
    with pytest.raises(Exception, match="403"):
        connect(url, origin="https://elsewhere.example", legacy=True)
