# SPDX-License-Identifier: Apache-2.0
"""Legal-looking requests that once took an engine down or reached other requests."""

import base64
import io
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.entrypoints.conftest import MODEL, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

SAMPLED_TALKER = {"temperature": 1, "max_tokens": 4}


def ask(server: LiveServer, content: Any = "hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
    return server.chat(body)


def sound(samples: np.ndarray, rate: int, subtype: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype=subtype)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


@pytest.mark.parametrize("value", ["x", ["x"], 3])
def test_a_client_cannot_speak_to_the_engine_core(server: LiveServer, value: Any) -> None:
    assert ask(server, vllm_xargs={"omni": value}).status_code < 500
    server.assert_answers()


@pytest.mark.parametrize(
    ("frames", "status"),
    [
        ({"top_k": -1}, 200),
        ({"top_k": -7}, 400),
        ({"top_k": 2**64 - 1}, 400),
        ({"temperature": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"top_p": 0}, 400),
        ("x", 400),
    ],
)
def test_sampling_inside_of_a_frame_is_checked(
    server: LiveServer, frames: Any, status: int
) -> None:
    talker = {**SAMPLED_TALKER, "extra_args": {"subtalker_sampling_params": frames}}
    reply = ask(server, modalities=["text", "audio"], sampling_params_list=[{}, talker, {}])
    assert reply.status_code == status, reply.text
    server.assert_answers()


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_sound_of_any_rate_is_heard(server: LiveServer, rate: int) -> None:
    tone = 0.1 * np.sin(np.arange(rate // 2) / 20)
    assert ask(server, [sound(tone, rate, "PCM_16")]).status_code == 200


@pytest.mark.parametrize("sample", [np.nan, 1e38])
def test_a_sound_of_no_numbers_reaches_nobody_else(server: LiveServer, sample: float) -> None:
    def texts() -> list[str]:
        replies = [ask(server, f"q {i}").json() for i in range(5)]
        return [reply["choices"][0]["message"]["content"] for reply in replies]

    before = texts()
    poison = sound(np.full(16_000, sample, np.float32), 16_000, "FLOAT")
    ask(server, [poison, {"type": "text", "text": "word " * 60}])
    assert texts() == before
