# SPDX-License-Identifier: Apache-2.0
"""The speech routes with a model behind them: a tiny Qwen3-TTS that speaks in recorded voices.

Their fields and errors are in `test_speech_api.py`, without one.
"""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.sync.client import connect

from tests.benchmarks.bench import bench
from tests.conftest import CHECKPOINTS
from tests.entrypoints.browser import Page
from tests.entrypoints.speech import recording
from vllm_omni.media.decode import decode_audio
from vllm_omni.testing.server import OmniServer
from vllm_omni.testing.tiny import build

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.tts, pytest.mark.slow]

MODEL = "tiny"
FAMILY = "qwen3_tts_base"
EXAMPLE = Path(__file__).parents[2] / "examples" / "online_serving" / "text_to_speech.py"
STAGES = ["qwen3_tts", "code2wav"]
SHORT = {"max_new_tokens": 24, "seed": 3}
ANN = {"ref_text": "What I say.", "consent": "the test's"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmniServer]:
    folder = tmp_path_factory.mktemp("speech")
    flags = (
        *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", "8000000"),
        *("--custom-voice-dir", str(folder / "voices")),
    )
    live = OmniServer(build(FAMILY, CHECKPOINTS / FAMILY), flags, log=folder / "log.txt", fork=True)
    live.start()
    file = {"audio_sample": ("ann.wav", recording(1.2), "audio/wav")}
    reply = httpx.post(f"{live.url}/v1/audio/voices", data={"name": "ann", **ANN}, files=file)
    assert reply.status_code == 200, reply.text
    yield live
    code = live.stop()
    assert code == 0, live.log_tail()
    assert "Traceback" not in live.log.read_text(errors="replace"), live.log_tail()


def test_the_playground_speaks(server: OmniServer, page: Page) -> None:
    page.open(server.url)
    page.ready()
    page.wait(lambda: page.all(".speak option[value=ann]"), "the voices")
    page.fill(".speak", input="Hi.", voice="ann", seed=3)
    page.send(".speak")
    samples, _ = decode_audio(page.save("#panel-speech a[download]"))
    assert len(samples)
    assert [row.text for row in page.all("#last .stages tbody th")] == STAGES
    assert "First sound after" in page.text("#last .seen")


def speak(server: OmniServer, text: str = "Hello there.", **fields: Any) -> bytes:
    body = {"input": text, "voice": "ann", "stream": False, "response_format": "pcm", **SHORT}
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body | fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.content


def metric(server: OmniServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def test_a_voice_is_the_same_however_it_comes_and_another_is_not(server: OmniServer) -> None:
    uploaded = speak(server)
    assert len(uploaded) > 2 * 1920
    for rate, same in ((24_000, True), (16_000, False)):
        source = base64.b64encode(recording(1.2, rate)).decode()
        inline = {"voice": None, "ref_audio": source, "ref_text": "What I say."}
        assert (speak(server, **inline) == uploaded) is same


def test_one_token_makes_no_frame_and_two_make_one(server: OmniServer) -> None:
    assert len(speak(server, max_new_tokens=1)) == 0
    assert len(speak(server, max_new_tokens=2)) == 2 * 1920


def test_openais_client_streams_what_it_would_get_at_once(server: OmniServer) -> None:
    whole = speak(server)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        speaking = client.audio.speech.with_streaming_response
        with speaking.create(
            model=MODEL, voice="ann", input="Hello there.", response_format="pcm", extra_body=SHORT
        ) as reply:
            pieces = list(reply.iter_bytes())
    assert b"".join(pieces) == whole
    assert metric(server, "vllm_omni:audio_ttfp_s_count") > 0


def test_sentences_over_a_websocket(server: OmniServer) -> None:
    config = {"type": "session.config", "voice": "ann", "response_format": "pcm", **SHORT}
    events = [config, {"type": "input.text", "text": "One. Two"}, {"type": "input.done"}]
    with connect(
        server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream", legacy=True
    ) as ws:
        for event in events:
            ws.send(json.dumps(event))
        received = [ws.recv(timeout=60)]
        while isinstance(received[-1], bytes) or "session.done" not in received[-1]:
            received.append(ws.recv(timeout=60))
    sounds = [each for each in received if isinstance(each, bytes)]
    assert sounds == [speak(server, "One."), speak(server, "Two")]


def test_a_client_that_leaves_frees_the_stages(server: OmniServer) -> None:
    body = {"input": "Hello there.", "voice": "ann", "max_new_tokens": 400, "seed": 5}
    for _ in range(3):
        with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=60) as reply:
            next(reply.iter_raw())
    deadline = time.monotonic() + 60
    while metric(server, "vllm_omni:num_requests_running"):
        assert time.monotonic() < deadline, "a request never ended"
        time.sleep(0.05)
    assert speak(server)


def test_the_example(server: OmniServer, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--url", f"{server.url}/v1", "--voice", "ann", "Hi."]
    out = tmp_path / "hi.flac"
    run = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert out.read_bytes()[:4] == b"fLaC"


@pytest.mark.parametrize("backend", ["openai-audio-speech", "openai-realtime-tts"])
def test_bench_serve(server: OmniServer, tmp_path: Path, backend: str) -> None:
    """REFERENCE.md 2.7."""
    load = ("--num-prompts", "3", "--max-concurrency", "2", "--print-stage")
    body = ("--extra-body", json.dumps({"voice": "ann", **SHORT}))
    result = bench(server.url, backend, tmp_path, "--dataset-name", "sentences", *load, *body)
    assert (result["completed"], result["failed"]) == (3, 0), result["errors"]
    assert 0 < result["median_audio_ttfp_ms"] <= result["median_audio_playable_ms"]
    assert result["total_audio_frames"] > 0
    assert result["total_audio_frames"] == round(24_000 * result["total_audio_duration_s"])
    assert result["stage_requests"].keys() == {"qwen3_tts", "code2wav"}
