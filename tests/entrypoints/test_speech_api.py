# SPDX-License-Identifier: Apache-2.0
"""The speech routes around an engine that makes tones: formats, streams, fields, errors.

Rows A-50 (`non_streaming_mode`), A-51 (`audio/pcm`), I-16 (recordings and instructions) and the
hostile inputs of issue 5. `test_speech_server.py` has a real model behind the same routes.
"""

import base64
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.entrypoints.generation_fuzz import fuzz
from tests.entrypoints.speech import (
    CHARACTER_S,
    FAILS_EARLY,
    FAILS_LATE,
    IS_REFUSED,
    MODEL,
    NEVER_ENDS,
    RATE,
    SpeechServer,
    recording,
    speech_server,
    spoken,
)
from vllm_omni.media.audio_encode import CONTENT_TYPES, to_int16
from vllm_omni.media.decode import decode_audio

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

TEXT = "Hello world"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechServer]:
    with speech_server(tmp_path_factory.mktemp("api") / "voices") as it:
        yield it


def data_url(data: bytes, media_type: str = "audio/wav") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


VOICE = data_url(recording(2.0))


def last_asked(server: SpeechServer) -> Any:
    return server.engine.asked[-1][0]


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]


# Formats and streams.


@pytest.mark.parametrize("format", ["wav", "mp3", "flac", "opus", "aac"])
def test_openais_client_gets_every_format(server: SpeechServer, format: str) -> None:
    with server.openai() as client:
        reply = client.audio.speech.create(
            model=MODEL, voice={"id": "Ryan"}, input=TEXT, response_format=format
        )
    assert reply.response.headers["content-type"] == CONTENT_TYPES[format]
    samples, _ = decode_audio(reply.content)
    assert len(samples) >= len(TEXT) * CHARACTER_S * 16_000
    assert last_asked(server).voice == "Ryan"


def test_pcm_is_bare_samples_and_says_so(server: SpeechServer) -> None:
    reply = server.speak(TEXT, response_format="pcm")
    assert reply.headers["content-type"] == "audio/pcm"
    assert reply.headers["x-sample-rate"] == str(RATE)
    assert reply.content == to_int16(spoken(TEXT)).tobytes()


def test_it_streams_while_it_is_made(server: SpeechServer) -> None:
    with server.openai() as client:
        speaking = client.audio.speech.with_streaming_response
        with speaking.create(
            model=MODEL, voice="vivian", input=f"{NEVER_ENDS} ends", response_format="pcm"
        ) as reply:
            pieces = reply.iter_bytes(1024)
            heard = b"".join(next(pieces) for _ in range(4))
    assert heard.startswith(to_int16(spoken(NEVER_ENDS[:3])).tobytes()[:1024])
    server.wait_idle()  # its client left, so it was aborted


def test_the_stages_timing_comes_where_there_is_a_place_for_it(server: SpeechServer) -> None:
    whole = server.speak(TEXT, stream=False, return_stage_metrics=True)
    (stage,) = json.loads(whole.headers["x-vllm-omni-stages"])
    assert (stage["stage"], stage["tokens"]) == ("talker", len(TEXT))
    *_, done = events(server.speak(TEXT, stream_format="sse", return_stage_metrics=True))
    assert done["metrics"] == {"stages": [stage]}
    assert "metrics" not in events(server.speak(TEXT, stream_format="sse"))[-1]
    assert "x-vllm-omni-stages" not in server.speak(TEXT, stream=False).headers
    server.assert_blames(server.speak(TEXT, return_stage_metrics=True), "return_stage_metrics")


@pytest.mark.parametrize("format", ["sse", "audio"])
def test_a_client_that_leaves_ends_what_it_asked_for(server: SpeechServer, format: str) -> None:
    url = f"http://{server.address}/v1/audio/speech"
    body = {"input": f"{NEVER_ENDS} ends", "stream_format": format}
    with httpx.stream("POST", url, json=body) as reply:
        next(reply.iter_raw())
    server.wait_idle()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={"input": f"{NEVER_ENDS} ends", "stream": False}, timeout=0.3)
    server.wait_idle()


def test_one_file_has_its_length_and_its_usage(server: SpeechServer) -> None:
    reply = server.speak(TEXT, stream=False)
    samples, rate = soundfile.read(io.BytesIO(reply.content), dtype="int16")
    assert rate == RATE and (samples == to_int16(spoken(TEXT))).all()
    assert reply.headers["content-length"] == str(len(reply.content))
    assert reply.headers["x-vllm-omni-output-tokens"] == str(len(TEXT))
    streamed = server.speak(TEXT).content
    assert streamed[44:] == reply.content[44:]
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4  # OpenAI's header of unknown length


def test_events_of_openais_shape(server: SpeechServer) -> None:
    *deltas, done = events(server.speak(TEXT, stream_format="sse", response_format="pcm"))
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    heard = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    assert heard == to_int16(spoken(TEXT)).tobytes()
    count = len(TEXT)
    usage = {"input_tokens": 5, "output_tokens": count, "total_tokens": count + 5}
    assert done == {"type": "speech.audio.done", "usage": usage}


def test_headers_say_what_is_in_the_file(server: SpeechServer) -> None:
    for format, rate in (("mp3", 96_000), ("opus", 44_100), ("aac", 50_000)):
        reply = server.speak(response_format=format, sample_rate=rate)
        assert "48000" in server.assert_blames(reply, "sample_rate")
    for format, rate in (("mp3", 16_000), ("opus", 16_000), ("flac", 50_000)):
        reply = server.speak(response_format=format, sample_rate=rate)
        assert reply.headers["x-sample-rate"] == str(decode_audio(reply.content)[1])
        assert ("x-bits-per-sample" in reply.headers) is (format == "flac")


def test_speed_keeps_the_pitch_and_sample_rate_is_kept(server: SpeechServer) -> None:
    fields = {"speed": 2.0, "sample_rate": 16_000, "response_format": "pcm"}
    text = "aaaaaaaaaaaaaaaaaaaaaaaaa"
    plain = np.frombuffer(server.speak(text, response_format="pcm").content, "<i2")
    reply = server.speak(text, **fields)
    fast = np.frombuffer(reply.content, "<i2")
    assert reply.headers["x-sample-rate"] == "16000"
    assert len(fast) == pytest.approx(len(plain) / 2 * 16 / 24, rel=0.1)

    def pitch(samples: np.ndarray, rate: int) -> float:
        return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))

    assert pitch(fast, 16_000) == pytest.approx(pitch(plain, RATE), rel=0.05)
    assert server.speak(text, stream=False, **fields).content == reply.content


# What goes wrong.


def test_what_fails_before_the_first_piece_is_a_status(server: SpeechServer) -> None:
    for fields in ({}, {"stream": False}, {"stream_format": "sse"}):
        assert server.speak(FAILS_EARLY, **fields).status_code == 500
        reply = server.speak(IS_REFUSED, **fields)
        assert "task_type" in server.assert_blames(reply, "task_type")


def test_what_fails_later_cuts_the_connection_or_is_an_event(server: SpeechServer) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        server.speak(f"{FAILS_LATE} it fails")
    *_, last = events(server.speak(f"{FAILS_LATE} it fails", stream_format="sse"))
    assert last["type"] == "speech.audio.error" and last["error"]["code"] == 500
    assert server.speak(f"{FAILS_LATE} it fails", stream=False).status_code == 500
    assert server.speak(TEXT).status_code == 200


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n\t", "...", "?!。、—", "\U0001f600", "\x00hi", "hi\x1b[31m", "a\x7f"),
        *("x" * 4097, "x" * 100_000, "a" * (1 << 21)),
    ],
)
def test_text_that_cannot_be_spoken(server: SpeechServer, text: str) -> None:
    server.assert_blames(server.speak(text), "input")


def test_half_a_character_is_refused(server: SpeechServer) -> None:
    reply = server.request(
        "POST",
        "/v1/audio/speech",
        content=b'{"input": "a\\ud800"}',
        headers={"content-type": "application/json"},
    )
    server.assert_blames(reply, "input")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("voice", "nobody"),
        ("voice.no", {"no": "id"}),
        ("voice.language", {"id": "Ryan", "language": "en"}),
        ("voice", {"id": "Ryan", "name": "Vivian"}),
        ("voice", "../../etc/passwd"),
        ("voice", "x" * 300),
        ("voice", 7),
        ("language", "Klingon"),
        ("task_type", "Sing"),
        ("response_format", "midi"),
        ("stream_format", "xml"),
        ("speed", -1),
        ("speed", 0.1),
        ("speed", 1e9),
        ("sample_rate", 1),
        ("sample_rate", 10**12),
        ("ref_audio", "nobody"),
        ("sampel_rate", 16_000),
        ("emotion", "joy"),
        ("seed", -1),
        ("seed", 2**70),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**12),
        ("temperature", -1),
        ("repetition_penalty", 1e-300),
        ("instructions", "x" * 501),
        ("instructions", "a\x00"),
        ("word_timestamps", True),
        ("timestamp_granularities", ["word"]),
        ("non_streaming_mode", "maybe"),
        ("ambient_sound", "rain"),
        ("duration_seconds", 5),
        ("ref_audio_codes", [[1, 2]]),
        ("extra_params.sadness", {"sadness": 1}),
        ("extra_params.emotion", {"emotion": "rage"}),
        ("extra_params." + "x" * 64, {"x" * 100_000: 1}),
        ("ref_text", "nobody said this"),
        ("speaker_embedding", []),
        ("speaker_embedding", [1.0] * 9000),
        ("initial_codec_chunk_frames", 0),
    ],
)
def test_the_field_at_fault_is_named(server: SpeechServer, param: str, value: Any) -> None:
    reply = server.speak(TEXT, **{param.partition(".")[0]: value})
    server.assert_blames(reply, param)


def test_what_was_likely_meant_is_told(server: SpeechServer) -> None:
    told = server.assert_blames(server.speak(TEXT, langage="English"), "langage")
    assert told == "Unknown parameter: 'langage'; did you mean 'language'?"
    assert server.speak(TEXT, langage=None).status_code == 200  # which says nothing


def test_numbers_that_are_none(server: SpeechServer) -> None:
    body = '{"input": "hi", "speed": NaN, "speaker_embedding": [1e999]}'
    headers = {"content-type": "application/json"}
    reply = server.request("POST", "/v1/audio/speech", content=body, headers=headers)
    assert reply.status_code == 400


def test_events_are_a_stream(server: SpeechServer) -> None:
    reply = server.speak(TEXT, stream=False, stream_format="sse")
    server.assert_blames(reply, "stream")


def test_another_model(server: SpeechServer) -> None:
    server.assert_blames(server.speak(TEXT, model="gpt"), "model", 404)
    assert server.request("GET", "/v1/models").json()["data"][0]["id"] == MODEL
    for path in ("chat/completions", "images/generations", "audio/transcriptions", "videos"):
        reply = server.request("POST", f"/v1/{path}", json={})
        assert "/v1/audio/speech" in server.assert_blames(reply, None, 404)
        assert reply.json()["error"]["type"] == "NotFoundError"
    document = server.request("GET", "/openapi.json").json()
    assert {"/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/voices"} <= set(
        document["paths"]
    )


def test_whatever_the_document_allows_is_answered(server: SpeechServer) -> None:
    assert fuzz(server, ("/v1/audio",)) == []


# What the engine is asked.


def test_every_field_reaches_the_engine(server: SpeechServer) -> None:
    reply = server.speak(
        TEXT,
        voice="ryan",
        language="chinese",
        task_type="customvoice",
        instructions="Softly.",
        non_streaming_mode=False,
        initial_codec_chunk_frames=2,
        extra_params={"emotion": "joy"},
        max_new_tokens=40,
        seed=7,
        temperature=0,
    )
    assert reply.status_code == 200, reply.text
    asked, sampling, _ = server.engine.asked[-1]
    assert (asked.voice, asked.language, asked.task) == ("Ryan", "Chinese", "CustomVoice")
    assert (asked.instructions, asked.non_streaming) == ("Softly.", False)
    assert asked.initial_frames == 2
    assert asked.extra == {"emotion": "joy"}
    assert sampling == [{"max_tokens": 40, "seed": 7, "temperature": 0.0}, None]


@pytest.mark.parametrize("given", [True, False, None])
def test_non_streaming_mode_has_three_states(server: SpeechServer, given: bool | None) -> None:
    assert server.speak(TEXT, non_streaming_mode=given).status_code == 200
    assert last_asked(server).non_streaming is given


def test_what_leaves_the_choice_to_the_checkpoint(server: SpeechServer) -> None:
    for fields in ({"voice": "default", "language": "Auto"}, {"voice": "", "task_type": ""}):
        assert server.speak(TEXT, **fields).status_code == 200
        asked = last_asked(server)
        assert asked.language is asked.task is None
        assert asked.voice == "Vivian"


# Recordings.


def test_recordings_of_voices(server: SpeechServer) -> None:
    bare = VOICE.partition(",")[2]
    for source in (VOICE, bare, [VOICE]):
        reply = server.speak(TEXT, ref_audio=source, ref_text="What I say.")
        assert reply.status_code == 200, reply.text
        (reference,) = last_asked(server).references
        assert (reference.sample_rate, reference.text) == (RATE, "What I say.")
        assert len(reference.samples) == 2 * RATE
    two = {"ref_audio": VOICE, "ref_audio_2": VOICE, "ref_text": ["One.", "Two."]}
    assert server.speak(TEXT, **two).status_code == 200
    assert [each.text for each in last_asked(server).references] == ["One.", "Two."]
    stereo = data_url(recording(1.5, rate=192_000, channels=2), "application/octet-stream")
    assert server.speak(TEXT, ref_audio=stereo, x_vector_only_mode=True).status_code == 200
    (reference,) = last_asked(server).references
    assert reference.samples.ndim == 1 and reference.sample_rate == 192_000


def file_with(*samples: float) -> bytes:
    """A recording some of whose samples are these."""
    wave = np.full(2 * RATE, 0.5, np.float32)
    wave[RATE : RATE + len(samples)] = samples
    file = io.BytesIO()
    soundfile.write(file, wave, RATE, "FLOAT", format="WAV")
    return file.getvalue()


BAD_RECORDINGS: dict[str, Any] = {
    "of 0 s": data_url(recording(0)),
    "too short": data_url(recording(0.5)),
    "too long": data_url(recording(31, 8000)),
    "an hour": data_url(recording(3600, 400)),
    "of NaN": data_url(file_with(*[np.nan] * RATE)),
    "with one NaN": data_url(file_with(np.nan)),
    "with an infinity": data_url(file_with(-np.inf)),
    "corrupt": data_url(b"RIFF" + bytes(range(256)) * 8),
    "cut": data_url(recording(2.0)[:30]),
    "no audio type": data_url(recording(2.0), "text/html"),
    "a picture": data_url(b"\x89PNG\r\n\x1a\n" + bytes(64), "image/png"),
    "a local file": "file:///etc/passwd",
    "metadata service": "http://169.254.169.254/latest",
    "this host": "http://127.0.0.1:9/voice.wav",
    "another scheme": "gopher://example.com/a.wav",
    "no base64": "data:audio/wav;base64,%%%",
    "a path": "/etc/passwd",
    "nothing": "",
    "a number": 7,
}


@pytest.mark.parametrize("name", BAD_RECORDINGS)
def test_bad_recordings(server: SpeechServer, name: str) -> None:
    reply = server.speak(TEXT, ref_audio=BAD_RECORDINGS[name], ref_text="Words.")
    server.assert_blames(reply, "ref_audio")


def test_too_many_recordings_and_too_few_words(server: SpeechServer) -> None:
    server.assert_blames(
        server.speak(TEXT, ref_audio=[VOICE] * 3, ref_text=["a"] * 3), "ref_audio.2"
    )
    server.assert_blames(server.speak(TEXT, ref_audio=VOICE), "ref_text")
    reply = server.speak(TEXT, ref_audio=VOICE, ref_text=["a", "b", "c"])
    server.assert_blames(reply, "ref_text")


# Batches.


def batch(server: SpeechServer, **body: Any) -> dict[str, Any]:
    reply = server.request("POST", "/v1/audio/speech/batch", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_batch_has_a_result_for_each(server: SpeechServer) -> None:
    items = [
        {"input": "one", "voice": "vivian"},
        {"input": "..."},
        {"input": FAILS_EARLY},
        {"input": "four", "non_streaming_mode": False, "response_format": "wav"},
        {"input": "five", "voice": "nobody"},
        {"voice": "Ryan"},
        {"input": "seven", "stream_format": "sse"},
    ]
    made = batch(server, voice="Ryan", response_format="pcm", non_streaming_mode=True, items=items)
    assert (made["total"], made["succeeded"], made["failed"]) == (7, 2, 5)
    results = made["results"]
    assert [each["index"] for each in results] == list(range(7))
    first = base64.b64decode(results[0]["audio_data"])
    assert first == to_int16(spoken("one")).tobytes()
    assert (results[0]["media_type"], results[3]["media_type"]) == ("audio/pcm", "audio/wav")
    assert results[0]["usage"]["output_tokens"] == 3
    blamed = {i: results[i]["error"]["param"] for i in (1, 2, 4, 5, 6)}
    assert blamed == {1: "input", 2: None, 4: "voice", 5: "input", 6: "stream_format"}
    asked = {each.text: each for each, _, _ in server.engine.asked[-4:]}
    assert (asked["one"].voice, asked["four"].voice) == ("Vivian", "Ryan")
    # Row A-50: an item's False wins over the batch's True.
    assert (asked["one"].non_streaming, asked["four"].non_streaming) == (True, False)


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("items", {"items": []}),
        ("items", {"items": [{"input": "a"}] * 65}),
        ("items", {}),
        ("items.0", {"items": ["text"]}),
        ("speed", {"items": [{"input": "a"}], "speed": 99}),
        *((name, {"items": [{"input": "a"}], name: "a"}) for name in ("input", "stream", "voise")),
    ],
)
def test_a_batch_that_is_none(server: SpeechServer, param: str, body: Any) -> None:
    reply = server.request("POST", "/v1/audio/speech/batch", json=body)
    server.assert_blames(reply, param)


def test_many_at_once_are_themselves(server: SpeechServer) -> None:
    texts = [f"number {i} of many" for i in range(24)]
    made: dict[str, bytes] = {}

    def speak(text: str) -> None:
        made[text] = server.speak(text, response_format="pcm").content

    threads = [threading.Thread(target=speak, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {text: to_int16(spoken(text)).tobytes() for text in texts}
