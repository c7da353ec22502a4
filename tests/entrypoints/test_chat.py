# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client against a live server: text, sound, both, whole and streamed."""

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest
import soundfile
from openai.types.chat import ChatCompletionChunk

from tests.benchmarks.bench import bench
from tests.entrypoints.conftest import MODEL, LiveServer

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni, pytest.mark.slow]

RATE = 24_000
MESSAGES = [{"role": "user", "content": "Say something."}]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 8,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
SAME_SPEECH = {"sampling_params_list": [{}, {"temperature": 0, "max_tokens": 24}, {}]}
SPOKEN: dict[str, Any] = {
    **GREEDY,
    "modalities": ["text", "audio"],
    "extra_body": {"ignore_eos": True, **SAME_SPEECH},
}


def voice(file_format: str = "wav") -> dict[str, Any]:
    return {"audio": {"voice": "Ethan", "format": file_format}}


def decoded(data: bytes) -> tuple[np.ndarray, int]:
    """Any file's samples and rate, by FFmpeg."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        return np.concatenate(frames, axis=1)[0], container.streams.audio[0].rate


class Heard:
    """What a client gathers from a stream."""

    def __init__(self, chunks: Iterable[ChatCompletionChunk]) -> None:
        self.chunks = list(chunks)
        self.text = self.transcript = ""
        self.pieces: list[bytes] = []
        self.finishes: list[str] = []
        self.expires_at: int | None = None
        for chunk in self.chunks:
            for choice in chunk.choices:
                self._add(choice)

    def _add(self, choice: Any) -> None:
        self.text += choice.delta.content or ""
        if choice.finish_reason:
            self.finishes.append(choice.finish_reason)
        audio = choice.delta.audio
        if audio is None:
            return
        self.transcript += audio.transcript or ""
        self.expires_at = audio.expires_at or self.expires_at
        if audio.data:
            self.pieces.append(base64.b64decode(audio.data, validate=True))

    @property
    def sound(self) -> bytes:
        return b"".join(self.pieces)


def test_text(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**GREEDY)
    assert reply.choices[0].message.content
    assert reply.choices[0].message.audio is None
    assert reply.usage.completion_tokens == 8
    assert reply.choices[0].finish_reason == "length"


def test_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY).choices[0].message.content
    usage = {"stream_options": {"include_usage": True}}
    heard = Heard(client.chat.completions.create(**GREEDY, stream=True, **usage))
    assert heard.text == whole
    assert heard.finishes == ["length"]
    assert heard.chunks[-1].usage.completion_tokens == 8
    assert not heard.pieces
    assert all(chunk.modality == "text" for chunk in heard.chunks if chunk.choices)


def test_logprobs_and_choices_stay_vllms(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        **{**GREEDY, "temperature": 1}, n=2, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert all(len(choice.logprobs.content) == 8 for choice in reply.choices)


def test_text_and_sound(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    reply = client.chat.completions.create(**SPOKEN, **voice())
    assert len(reply.choices) == 1
    message = reply.choices[0].message
    assert message.content == message.audio.transcript == text
    assert message.audio.id.startswith("audio_")
    assert message.audio.expires_at > reply.created
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)))
    assert rate == RATE
    assert len(samples) > 0
    metadata = reply.choices[0].audio_metadata
    assert metadata == {
        "format": "wav",
        "sample_rate_hz": RATE,
        "channels": 1,
        "frame_count": len(samples),
    }
    assert reply.usage.completion_tokens == 8


def test_sound_alone_has_no_content(client: openai.OpenAI) -> None:
    message = (
        client.chat.completions.create(**{**SPOKEN, "modalities": ["audio"]}, **voice())
        .choices[0]
        .message
    )
    assert message.content is None
    assert message.audio.transcript
    assert message.audio.data


def test_streamed_sound(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**SPOKEN, **voice("pcm16")).choices[0].message
    usage = {"stream_options": {"include_usage": True}}
    heard = Heard(client.chat.completions.create(**SPOKEN, **voice("pcm16"), stream=True, **usage))
    assert heard.text == heard.transcript == whole.content
    assert heard.finishes == ["length"]
    assert heard.expires_at is not None
    streamed = np.frombuffer(heard.sound, "<i2").astype(np.int32)
    expected = np.frombuffer(base64.b64decode(whole.audio.data), "<i2").astype(np.int32)
    assert len(streamed) == len(expected)
    assert np.abs(streamed - expected).max() <= 1
    usage_chunk = heard.chunks[-1]
    assert usage_chunk.choices == []
    assert usage_chunk.usage.completion_tokens == 8
    finish = next(i for i, c in enumerate(heard.chunks) if c.choices and c.choices[0].finish_reason)
    audible = [i for i, c in enumerate(heard.chunks) if getattr(c, "modality", "") == "audio"]
    assert finish == max(audible), "the finish comes after all sound"


def test_streamed_wav_is_one_file(client: openai.OpenAI) -> None:
    heard = Heard(client.chat.completions.create(**SPOKEN, **voice("wav"), stream=True))
    assert heard.sound[:4] == b"RIFF"
    assert heard.sound.count(b"RIFF") == 1
    assert heard.sound[4:8] == heard.sound[40:44] == b"\xff" * 4
    whole = client.chat.completions.create(**SPOKEN, **voice()).choices[0].audio_metadata
    assert len(heard.sound) == 44 + 2 * whole["frame_count"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("file_format", ["mp3", "flac", "opus", "aac"])
def test_formats(client: openai.OpenAI, file_format: str, stream: bool) -> None:
    expected = client.chat.completions.create(**SPOKEN, **voice()).choices[0].audio_metadata
    reply = client.chat.completions.create(**SPOKEN, **voice(file_format), stream=stream)
    if stream:
        data = Heard(reply).sound
    else:
        data = base64.b64decode(reply.choices[0].message.audio.data)
    samples, rate = decoded(data)
    seconds = expected["frame_count"] / RATE
    assert len(samples) / rate == pytest.approx(seconds, abs=0.15)


def test_audio_parameter_alone_asks_for_sound(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(**GREEDY, **voice()).choices[0].message.audio is not None


def test_voices_are_compared_without_case(client: openai.OpenAI) -> None:
    for chosen in ("ethan", "ETHAN", {"id": "Ethan"}):
        audio = {"voice": chosen, "format": "wav"}
        reply = client.chat.completions.create(**SPOKEN, audio=audio)
        assert reply.choices[0].message.audio.data


def test_sampling_params_per_stage(client: openai.OpenAI) -> None:
    body = {"ignore_eos": True, "sampling_params_list": [{"max_tokens": 3}, {}, {}]}
    reply = client.chat.completions.create(**{**SPOKEN, "extra_body": body}, **voice())
    assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]])
def test_stage_metrics(client: openai.OpenAI, modalities: list[str]) -> None:
    request = {**GREEDY, "modalities": modalities, "extra_body": {"return_stage_metrics": True}}
    names = {
        stage["stage"] for stage in client.chat.completions.create(**request).metrics["stages"]
    }
    assert "thinker" in names
    assert ("talker" in names) == ("audio" in modalities)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert [bool(getattr(chunk, "metrics", None)) for chunk in chunks].count(True) == 1


def test_a_spoken_turn_can_be_sent_back(client: openai.OpenAI) -> None:
    spoken = client.chat.completions.create(**SPOKEN, **voice()).choices[0].message.audio

    def prompt_tokens(turn: dict[str, Any]) -> int:
        history = [*MESSAGES, {"role": "assistant", **turn}, *MESSAGES]
        reply = client.chat.completions.create(**{**GREEDY, "messages": history})
        return reply.usage.prompt_tokens

    by_id = prompt_tokens({"audio": {"id": spoken.id}})
    assert by_id == prompt_tokens({"content": spoken.transcript})


def test_harmless_processor_options_need_no_trust(client: openai.OpenAI) -> None:
    body = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    assert client.chat.completions.create(**{**GREEDY, "extra_body": body}).usage


def test_models_and_unknown_routes(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/nothing", cast_to=object)
    assert "Not Found" in caught.value.body["message"]


def test_bench_serve(server: LiveServer, checkpoint: Path, tmp_path: Path) -> None:
    """Text, pictures, sounds and videos go in; text and sound come out (REFERENCE.md 2.7)."""
    media = ("--dataset-name", "random-mm", "--random-mm-base-items-per-request", "3")
    buckets = ("--random-mm-bucket-config", "{(32, 32, 1): 0.3, (0, 1, 1): 0.3, (32, 32, 3): 0.4}")
    limits = ("--random-mm-limit-mm-per-prompt", '{"image": 1, "audio": 1, "video": 1}')
    sizes = ("--random-input-len", "8", "--output-len", "4", "--num-prompts", "3")
    load = ("--request-rate", "20", "--temperature", "0", "--print-stage")
    model = ("--tokenizer", str(checkpoint))
    options = (*media, *buckets, *limits, *sizes, *load, *model)
    result = bench(server.url, "openai-chat-omni", tmp_path, *options)
    assert (result["completed"], result["failed"]) == (3, 0), result["errors"]
    assert result["total_output_tokens"] == 12
    assert 0 < result["median_ttft_ms"] < result["median_audio_playable_ms"]
    assert {"mean_tpot_ms", "mean_audio_rtf", "mean_audio_underrun_s"} <= set(result)
    assert result["stage_requests"] == {"thinker": 3, "talker": 3, "code2wav": 3}
    assert all(result["stage_durations_mean"].values())
    realtime = ("--dataset-name", "random", *sizes, *model)
    result = bench(server.url, "openai-realtime-chat", tmp_path, *realtime)
    assert (result["completed"], result["failed"]) == (3, 0), result["errors"]
    assert result["total_audio_duration_s"] > 0 and result["median_ttft_ms"] > 0
    vllms = ("--endpoint", "/v1/chat/completions", *realtime)
    result = bench(server.url, "openai-chat", tmp_path, *vllms)
    assert (result["completed"], result["total_output_tokens"]) == (3, 12), result["errors"]
    assert "requests" not in result, "vLLM's own, unchanged"
