# SPDX-License-Identifier: Apache-2.0
"""Sounds from a text over HTTP, from a live server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.browser import Page
from tests.entrypoints.generation import KEY, MODEL, STEPS, GenerationServer, generation_server
from vllm_omni.media.decode import decode_audio

pytestmark = [pytest.mark.advanced_model, pytest.mark.cpu, pytest.mark.diffusion]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GenerationServer]:
    with generation_server("stable_audio", tmp_path_factory.mktemp("composer")) as it:
        yield it


def generate(server: GenerationServer, **fields: Any) -> httpx.Response:
    body = {"input": "rain", "model": MODEL, "seed": 1, **STEPS, **fields}
    return server.request("POST", "/v1/audio/generate", json=body)


def test_a_sound_of_each_format(server: GenerationServer) -> None:
    wav = generate(server)
    assert (wav.status_code, wav.headers["content-type"]) == (200, "audio/wav"), wav.text
    assert wav.headers["x-model"] == MODEL
    samples, rate = decode_audio(wav.content)
    assert generate(server).content == wav.content
    for format in ("flac", "mp3", "opus", "aac"):
        found, _ = decode_audio(generate(server, response_format=format).content)
        assert len(found)
    pcm = generate(server, response_format="pcm").content
    assert wav.content[44:] == pcm
    faster, _ = decode_audio(generate(server, speed=2.0).content)
    assert len(faster) == pytest.approx(len(samples) / 2, rel=0.15)
    assert rate > 0
    for start in (0, 0.5):
        later, _ = decode_audio(generate(server, audio_length=1, audio_start=start).content)
        assert len(later) == pytest.approx(rate, rel=0.01)


def test_the_stages_timing_is_in_a_header(server: GenerationServer) -> None:
    assert "x-vllm-omni-stages" not in generate(server).headers
    timed = generate(server, return_stage_metrics=True)
    (stage,) = json.loads(timed.headers["x-vllm-omni-stages"])
    assert 0 <= stage["submitted_s"] <= stage["first_output_s"] <= stage["finished_s"]


def test_the_playground_composes(server: GenerationServer, page: Page) -> None:
    page.open(server.url)
    page.use_key(KEY)
    form = "#panel-sounds form"
    page.fill(form, input="rain", audio_length=1, seed=1, **STEPS)
    page.send(form)
    assert page.save("#panel-sounds a[download]") == generate(server, audio_length=1).content
    assert [row.text for row in page.all("#last .stages tbody th")] == ["diffusion"]
    page.shot("sounds")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("input", ""),
        ("audio_length", -1),
        ("audio_length", 1e-9),
        ("audio_length", 1e6),
        ("response_format", "midi"),
        ("speed", 9),
        ("num_frames", 5),
        ("extra_params.nonsense", {"nonsense": 1}),
        ("foo", 1),
        ("flow_shift", 3.0),
    ],
)
def test_the_field_at_fault_is_named(server: GenerationServer, param: str, value: Any) -> None:
    server.assert_blames(generate(server, **{param.partition(".")[0]: value}), param)
    assert generate(server).status_code == 200


def test_the_right_route_is_told(server: GenerationServer) -> None:
    reply = server.request("POST", "/v1/images/generations", json={"prompt": "rain"})
    assert "/v1/audio/generate" in server.assert_blames(reply, "model")


def test_the_example(server: GenerationServer, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "online_serving" / "text_to_audio.py"
    ask = ["rain", "--url", f"{server.url}/v1", "--steps", "2", "--seconds", "0.1"]
    command = [sys.executable, str(script), *ask, "--out", "rain.flac"]
    env = {**os.environ, "OPENAI_API_KEY": KEY}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=120)
    samples, _ = decode_audio((tmp_path / "rain.flac").read_bytes())
    assert len(samples)
