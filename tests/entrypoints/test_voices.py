# SPDX-License-Identifier: Apache-2.0
"""Uploaded voices: kept over restarts, named in requests, and nothing hidden in them (issue 5)."""

import asyncio
import base64
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors import safe_open

from tests.entrypoints.speech import OFFER, RATE, SpeechServer, recording, speech_server
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings
from vllm_omni.entrypoints.openai.speech.recordings import Recordings
from vllm_omni.entrypoints.openai.speech.voices import Voice, VoiceRecord, VoiceStore
from vllm_omni.entrypoints.single_flight import SingleFlightCache
from vllm_omni.errors import OmniClientError

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

CONSENT = {"consent": "agreement 17"}
VOICES = "/v1/audio/voices"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "voices"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SpeechServer]:
    with speech_server(folder) as it:
        yield it


def upload(
    server: SpeechServer,
    name: str,
    data: bytes | None = None,
    file_name: str = "voice.wav",
    **fields: Any,
) -> httpx.Response:
    file = (file_name, recording(1.5) if data is None else data, "audio/wav")
    form = {"name": name, **CONSENT, **fields}
    return server.request("POST", VOICES, data=form, files={"audio_sample": file})


def listed(server: SpeechServer) -> dict[str, Any]:
    return dict(server.request("GET", VOICES).json())


def test_from_upload_to_deletion(server: SpeechServer, folder: Path) -> None:
    fields = {"ref_text": "What I say.", "speaker_description": "An old man."}
    reply = upload(server, "José 2", **fields)
    assert reply.status_code == 200, reply.text
    found = listed(server)
    assert found["voices"] == ["Vivian", "Ryan", "José 2"]
    assert found["languages"] == list(OFFER.languages) and found["tasks"] == list(OFFER.tasks)
    (voice,) = found["uploaded_voices"]
    assert voice == reply.json()["voice"]
    assert voice | CONSENT | fields | {"seconds": 1.5, "sample_rate": RATE} == voice
    assert server.request("GET", f"{VOICES}/josé 2").json() == voice
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["voice"])["name"] == "José 2"
        assert file.get_tensor("samples").shape == (1.5 * RATE,)

    for spelling in ("JOSÉ 2", "José 2"):  # another case, and the accent by itself
        assert server.speak(voice=spelling).status_code == 200
        (reference,) = server.engine.asked[-1][0].references
        assert (reference.text, len(reference.samples)) == ("What I say.", 1.5 * RATE)
        assert server.engine.asked[-1][0].voice is None
    assert server.speak(ref_audio="josé 2").status_code == 200
    assert server.speak(voice="josé 2", ref_text="Else.").status_code == 200
    assert server.engine.asked[-1][0].references[0].text == "Else."

    both = {"voice": "josé 2", "speaker_embedding": [1.0]}
    server.assert_blames(server.speak(**both), "voice")

    assert server.request("DELETE", f"{VOICES}/josé 2").json()["deleted"]
    for method in ("GET", "DELETE"):
        server.assert_blames(server.request(method, f"{VOICES}/josé 2"), "name", 404)
    server.assert_blames(server.speak(voice="José 2"), "voice")


def test_an_embedding_in_place_of_a_recording(server: SpeechServer) -> None:
    form = {"name": "vector", **CONSENT, "speaker_embedding": "[0.5, -1, 2]"}
    reply = server.request("POST", VOICES, data=form, files={"speaker_description": ("", b"")})
    assert reply.status_code == 200, reply.text
    assert server.speak(voice="vector").status_code == 200
    embedding = server.engine.asked[-1][0].speaker_embedding
    np.testing.assert_array_equal(embedding, np.array([0.5, -1, 2], np.float32))
    assert reply.json()["voice"]["seconds"] is reply.json()["voice"]["sample_rate"] is None
    zeros = {**form, "name": "none", "speaker_embedding": "[0, 0]"}
    server.assert_blames(server.request("POST", VOICES, data=zeros), "speaker_embedding")
    server.assert_blames(server.speak(ref_audio="vector", ref_text="a"), "ref_audio")
    assert server.request("DELETE", f"{VOICES}/vector").status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        *("", " a", "../a", "a/b", "..", ".hidden", "a\x00", "<script>", "a\u202eb", "x" * 65),
        *("vivian", "RYAN", "default", "a\\b", "a ", "a\n", "%2e%2e"),
        # What looks like another name: full width, an unseen mark or letter, another alphabet.
        *("ｖｉｖｉａｎ", "ｄｅｆａｕｌｔ", "ann\ufe0f", "ann\u3164", "vivi\u0430n", "ΑNN"),
    ],
)
def test_names_that_are_none(server: SpeechServer, folder: Path, name: str) -> None:
    server.assert_blames(upload(server, name), "name")
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("consent", {"consent": ""}),
        ("consent", {"consent": "x" * 1001}),
        ("ref_text", {"ref_text": "x" * 5000}),
        ("ref_text", {"ref_text": "..."}),
        ("speaker_description", {"speaker_description": "a\x00"}),
        ("speaker_embedding.0", {"speaker_embedding": "[1e999]"}),
        ("speaker_embedding", {"speaker_embedding": "__import__('os')"}),
        ("audio_sample", {"speaker_embedding": "[1]"}),
        ("ref_txt", {"ref_txt": "What I say."}),
        ("audio_sample", {"data": recording(0.3)}),
        ("audio_sample", {"data": recording(31, 8000)}),
        ("audio_sample", {"data": b""}),
        ("audio_sample", {"data": b"<script>alert(1)</script>"}),
        ("audio_sample", {"data": np.zeros(9).tobytes()}),
        ("audio_sample", {"file_name": "<script>alert(1)</script>.wav"}),
        ("audio_sample", {"file_name": "../../etc/cron.d/x.wav"}),
        ("audio_sample", {"file_name": "voice\u202evaw.exe"}),
    ],
)
def test_uploads_that_are_none(
    server: SpeechServer, folder: Path, param: str, fields: dict[str, Any]
) -> None:
    reply = upload(server, "someone", **fields)
    server.assert_blames(reply, param)
    assert "<script>" not in reply.text
    assert not list(folder.glob("*.safetensors"))


def test_a_voice_without_its_words_says_what_it_needs(server: SpeechServer) -> None:
    assert "x_vector_only_mode" in upload(server, "silent one").json()["note"]
    assert server.speak(voice="silent one", x_vector_only_mode=True).status_code == 200
    server.assert_blames(server.speak(voice="silent one"), "ref_text")
    assert server.request("DELETE", f"{VOICES}/silent one").status_code == 200
    assert "reserved" in server.assert_blames(upload(server, "default"), "name")


def test_the_checkpoints_own_stay(server: SpeechServer) -> None:
    server.assert_blames(server.request("DELETE", f"{VOICES}/ryan"), "name")
    assert server.request("DELETE", f"{VOICES}/..%2f..%2fetc").status_code == 404


def test_a_model_that_clones_no_voices(tmp_path: Path) -> None:
    offer = replace(OFFER, max_references=0, instructions=False, languages=())
    VoiceStore(tmp_path / "voices").add(voice("ann"))  # of a server that shares the folder
    with speech_server(tmp_path / "voices", offer=offer) as server:
        server.assert_blames(upload(server, "someone"), "audio_sample")
        source = base64.b64encode(recording(2.0)).decode()
        for fields in (
            {"ref_audio": source},
            {"speaker_embedding": [1.0]},
            {"x_vector_only_mode": True},
            {"instructions": "Softly."},
            {"language": "English"},
        ):
            server.assert_blames(server.speak(**fields), next(iter(fields)))
        found = listed(server)
        assert found["languages"] == [] and found["voices"] == list(OFFER.voices)
        assert [each["name"] for each in found["uploaded_voices"]] == ["ann"]
        assert "an uploaded voice" in server.assert_blames(server.speak(voice="ann"), "voice")


def test_a_model_that_does_not_read_what_a_recording_says(tmp_path: Path) -> None:
    """Nor one sampling parameter: who sends these learns it, who names a voice need not care."""
    offer = replace(
        OFFER,
        needs_transcript=False,
        reads_transcripts=False,
        unread_sampling=frozenset({"repetition_penalty"}),
    )
    with speech_server(tmp_path / "voices", offer=offer) as server:
        assert upload(server, "ann", ref_text="What I say.").status_code == 200
        for how in ({"voice": "ann"}, {"ref_audio": "ann"}):
            assert server.speak(**how).status_code == 200
            assert [each.text for each in server.engine.asked[-1][0].references] == [None]
            server.assert_blames(server.speak(**how, ref_text="Words."), "ref_text")
        server.assert_blames(server.speak(repetition_penalty=1.5), "repetition_penalty")


# The store by itself.


def voice(name: str, seconds: float = 1.0) -> Voice:
    record = VoiceRecord(name=name, consent="c", created_at=1, sample_rate=RATE, seconds=seconds)
    return Voice(record, samples=np.full(int(seconds * RATE), 0.5, np.float32))


def test_voices_outlive_their_server_and_broken_files_do_not_matter(tmp_path: Path) -> None:
    VoiceStore(tmp_path).add(voice("Ann"))
    (tmp_path / ("0" * 40 + ".safetensors")).write_bytes(b"no voice")
    os.mkfifo(tmp_path / ("1" * 40 + ".safetensors"))  # whoever opens it waits
    (tmp_path / ".new-abc").write_bytes(b"half a voi")
    store = VoiceStore(tmp_path)
    assert [record.name for record in store.records()] == ["Ann"]
    assert len(store.get("ANN").samples) == RATE


def test_a_name_has_one_form(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path)
    store.add(voice("Prof. ﬁsh 2"))
    for name in ("prof. fish ２", "PROF. FISH 2"):
        assert store.get(name).record.name == "Prof. ﬁsh 2"
        with pytest.raises(OmniClientError) as caught:
            store.add(voice(name))
        assert caught.value.code == "voice_exists"
    store.add(voice("Анна"))  # an alphabet by itself
    assert len(store.records()) == 2


def test_the_list_is_read_again_where_it_changed(tmp_path: Path) -> None:
    store, other = VoiceStore(tmp_path), VoiceStore(tmp_path)
    for name in ("a", "b", "c"):
        other.add(voice(name, 0.01))
    assert [record.name for record in store.records()] == ["a", "b", "c"]
    other.delete("b")
    other.delete("c")
    other.add(replace(voice("c"), record=VoiceRecord(name="C", consent="d", created_at=2)))
    assert [(record.name, record.consent) for record in store.records()] == [("a", "c"), ("C", "d")]
    kept, again = store.records(), store.records()
    assert kept == again and all(x is y for x, y in zip(kept, again, strict=True)), "read once"


def test_many_writers_and_a_bound(tmp_path: Path) -> None:
    stores = [VoiceStore(tmp_path / "shared", most=10) for _ in range(3)]
    refused: list[str | None] = []

    def add(i: int) -> None:
        try:
            stores[i % 3].add(voice(f"voice {i % 15}", 0.01))
        except OmniClientError as error:
            refused.append(error.code)

    threads = [threading.Thread(target=add, args=(i,)) for i in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0].records()) == 10
    assert len(refused) == 20 and set(refused) <= {"voice_exists", "too_many_voices"}
    assert not list((tmp_path / "shared").glob(".new-*"))


# What was read once.


async def test_a_recording_is_decoded_once() -> None:
    """Row I-16; three at once, as in row A-61."""
    recordings = Recordings(FetchSettings(), (1.0, 30.0))
    data = recording(2.0)
    found = await asyncio.gather(*(recordings.of(data, f"ref_audio.{i}") for i in range(3)))
    assert found[0] is found[1] is found[2] is await recordings.of(bytes(data), "again")
    assert not found[0].samples.flags.writeable
    with pytest.raises(OmniClientError) as caught:
        await recordings.of(b"no sound", "ref_audio_2")
    assert caught.value.param == "ref_audio_2" and "recording" not in caught.value.message


async def test_the_cache_keeps_its_bounds_and_no_failures() -> None:
    cache: SingleFlightCache[bytes] = SingleFlightCache(3, 10, len)
    made: list[str] = []

    async def make(key: str, size: int) -> bytes:
        made.append(key)
        await asyncio.sleep(0)
        if size < 0:
            raise ValueError(key)
        return bytes(size)

    async def get(key: str, size: int = 1) -> bytes:
        return await cache.get(key, lambda: make(key, size))

    for key in "abcad":  # the fourth entry drives out the oldest use, b
        await get(key)
    assert (made, len(cache)) == (list("abcd"), 3)
    await get("b")
    assert made[-1] == "b"
    await get("huge", 11)
    assert (len(cache), cache.nbytes) == (3, 3)
    await get("large", 9)
    assert (len(cache), cache.nbytes) == (2, 10)
    for _ in range(2):
        results = await asyncio.gather(*(get("bad", -1) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(each, ValueError) for each in results)
    assert made.count("bad") == 2
    impatient = asyncio.create_task(get("slow"))
    patient = asyncio.create_task(get("slow"))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await patient == b"\0" and made.count("slow") == 1
