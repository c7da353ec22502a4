# SPDX-License-Identifier: Apache-2.0
"""Uploads to vLLM's transcription routes pass the same checks as any sound."""

import socket

import httpx
import numpy as np
import pytest

from tests.entrypoints.conftest import MODEL, LiveServer
from vllm_omni.testing import media

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

ROUTES = ["/v1/audio/transcriptions", "/v1/audio/translations"]


def upload(server: LiveServer, route: str, data: bytes) -> httpx.Response:
    form = {"model": MODEL, "temperature": "0", "max_completion_tokens": "4"}
    return httpx.post(f"{server.url}{route}", data=form, files={"file": data}, timeout=60)


@pytest.mark.parametrize("route", ROUTES)
def test_sounds_are_taken(server: LiveServer, route: str) -> None:
    for data in (
        media.encode_audio(media.sound(0.5)),
        media.encode_audio(media.sound(0.5, 44_100), 44_100, "flac"),
        media.encode_audio(np.full(8_000, np.nan, np.float32)),
    ):
        reply = upload(server, route, data)
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("data", [b"garbage" * 9, media.encode_audio(media.sound(0.5))[:44]])
def test_what_is_no_sound_is_refused(server: LiveServer, route: str, data: bytes) -> None:
    reply = upload(server, route, data)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "file"


@pytest.mark.parametrize("route", ROUTES)
def test_a_playlist_leads_nowhere(server: LiveServer, route: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as inner:
        inner.settimeout(0.2)
        url = f"http://127.0.0.1:{inner.getsockname()[1]}/secret.ts"
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n"
        assert upload(server, route, playlist.encode()).status_code == 400
        with pytest.raises(TimeoutError):
            inner.accept()
    server.assert_answers()
