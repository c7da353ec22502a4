# SPDX-License-Identifier: Apache-2.0
"""Weaving sound into the events of text, with an engine and a chat that are scripted."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_omni.entrypoints.openai.chat_audio import AudioStream
from vllm_omni.entrypoints.openai.turn import Turn
from vllm_omni.outputs import AudioOutput, OmniRequestOutput, StageMetrics

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

METRICS = (StageMetrics("thinker", 0, 0.0, 0.1, 0.2, 1, 1),)


def text(words: str, finish: str | None = None) -> OmniRequestOutput:
    output = CompletionOutput(0, words, [1], None, None, finish_reason=finish)
    return OmniRequestOutput(
        "r", final_output_type="text", finished=finish is not None, outputs=[output]
    )


def sound(count: int, *, last: bool = False) -> OmniRequestOutput:
    audio = AudioOutput(np.full(count, 0.5, np.float32), 24_000) if count else None
    output = OmniRequestOutput("r", final_output_type="audio", audio=audio, finished=last)
    output.stage_metrics = METRICS if last else ()
    return output


async def engine(*script: Any) -> AsyncGenerator[RequestOutput, None]:
    for item in script:
        await asyncio.sleep(0)
        if isinstance(item, Exception):
            raise item
        yield item


async def chat(outputs: Any, *, usage: bool = False) -> AsyncGenerator[str, None]:
    """What vLLM's generator does, in short."""
    try:
        async for output in outputs:
            for each in output.outputs:
                choice = {"index": 0, "delta": {"content": each.text}, "logprobs": None}
                choice["finish_reason"] = each.finish_reason
                yield f"data: {json.dumps({'id': 'r', 'choices': [choice]})}\n\n"
        if usage:
            yield f"data: {json.dumps({'id': 'r', 'choices': [], 'usage': {}})}\n\n"
    except ValueError as error:
        yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
    yield "data: [DONE]\n\n"


async def woven(turn: Turn, *script: Any, usage: bool = False) -> list[Any]:
    stream = AudioStream(turn, "r", "m", 1)
    events = stream.events(engine(*script), chat(stream.text(), usage=usage))
    got = [event.removeprefix("data: ").strip() async for event in events]
    assert got.pop() == "[DONE]"
    return [json.loads(event) for event in got]


def spoken(**kwargs: Any) -> Turn:
    return Turn(("text", "audio"), audio_format="pcm16", **kwargs)


async def test_order_is_that_of_the_engine() -> None:
    script = (text("a"), sound(1), text("b", "stop"), sound(2), sound(3, last=True))
    chunks = await woven(spoken(), *script)
    kinds = [chunk["modality"] for chunk in chunks]
    assert sorted(kinds[:-1]) == ["audio"] * 3 + ["text"] * 2
    sizes = [c["audio_metadata"]["frame_count"] for c in _choices(chunks) if "audio_metadata" in c]
    assert sizes == [1, 2, 3]


async def test_finish_waits_for_the_sound() -> None:
    chunks = await woven(spoken(), text("a", "stop"), sound(4), sound(0, last=True))
    finishes = [choice["finish_reason"] for choice in _choices(chunks)]
    assert finishes == [None, None, "stop"]
    assert _choices(chunks)[-1]["delta"]["audio"].keys() == {"id", "expires_at"}


async def test_transcript_and_content() -> None:
    turn = spoken()
    chunks = await woven(turn, text("a"), text("b", "stop"), sound(1, last=True))
    deltas = [choice["delta"] for choice in _choices(chunks)]
    assert "".join(delta.get("content", "") for delta in deltas) == "ab"
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    assert "".join(a.get("transcript", "") for a in audio) == "ab" == turn.transcript
    assert {a["id"] for a in audio} == {turn.audio_id}


async def test_sound_alone_has_no_content() -> None:
    turn = Turn(("audio",), audio_format="pcm16")
    chunks = await woven(turn, text("a", "stop"), sound(1, last=True))
    assert all("content" not in choice["delta"] for choice in _choices(chunks))
    assert turn.transcript == "a"


async def test_samples_arrive() -> None:
    chunks = await woven(spoken(), text("a", "stop"), sound(3), sound(2, last=True))
    data = b"".join(
        base64.b64decode(choice["delta"]["audio"]["data"])
        for choice in _choices(chunks)
        if "data" in choice["delta"].get("audio", {})
    )
    assert np.frombuffer(data, "<i2").tolist() == [16384] * 5


async def test_usage_and_metrics_come_last() -> None:
    turn = spoken(wants_metrics=True)
    chunks = await woven(turn, text("a", "stop"), sound(1, last=True), usage=True)
    assert "usage" in chunks[-1]
    assert chunks[-2]["metrics"]["stages"][0]["stage"] == "thinker"
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"


async def test_an_error_is_told_and_nothing_after_it() -> None:
    chunks = await woven(spoken(), text("a"), sound(1), ValueError("broken"))
    assert chunks[-1] == {"error": {"message": "broken"}}
    assert all(choice["finish_reason"] is None for choice in _choices(chunks[:-1]))


async def test_a_client_that_leaves_closes_the_engines_stream() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[RequestOutput, None]:
        try:
            while True:
                yield text("a")
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    stream = AudioStream(spoken(), "r", "m", 1)
    events = stream.events(endless(), chat(stream.text()))
    await anext(events)
    await events.aclose()
    await asyncio.wait_for(closed.wait(), 1)


def _choices(chunks: list[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]
