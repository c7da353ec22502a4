# SPDX-License-Identifier: Apache-2.0
"""WebSockets: `/v1/audio/speech/stream` and `/v1/realtime`; the handshake counts."""

import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.benchmarks.backends.calling import MAX_TOLD, AnswerError, headers_of, model_of
from vllm_omni.benchmarks.backends.media import items
from vllm_omni.benchmarks.backends.pcm import BITS, RATE, PcmReader
from vllm_omni.benchmarks.backends.speech import DEFAULTS
from vllm_omni.benchmarks.outputs import OmniOutput

CLOSED = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
TEXTS = ("response.output_text.delta", "response.output_audio_transcript.delta")


async def speak_over_socket(
    asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput
) -> None:
    """Have a text spoken, sentence by sentence, and listen."""
    config = {"model": model_of(asked), **DEFAULTS, "stream_audio": True}
    if asked.output_len:
        config["max_new_tokens"] = asked.output_len
    config |= asked.extra_body or {}
    sound, reader = output.hear(), PcmReader(config["response_format"], {})
    async with _connect(session, asked.api_url, asked) as socket:
        await socket.send_json({"type": "session.config", **config})
        await socket.send_json({"type": "input.text", "text": asked.prompt})
        await socket.send_json({"type": "input.done"})
        async for now, event in _events(socket):
            if isinstance(event, bytes):
                sound.byte(now)
                sound.add(now, reader.feed(event), reader.rate)
            elif event["type"] == "audio.start":
                headers = {"X-Sample-Rate": event["sample_rate"], "X-Channels": event["channels"]}
                reader = PcmReader(config["response_format"], headers)
            elif event["type"] == "session.done":
                break
        output.ended()
    if not output.heard():
        raise AnswerError("the answer has no sound")
    output.sound_took_s = output.latency


async def converse(
    asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput
) -> None:
    """Say one thing, in text and pictures, and listen to the answer."""
    if items(asked, "audio_url") or items(asked, "video_url"):
        raise AnswerError("openai-realtime-chat sends text and pictures only")
    url = f"{asked.api_url}?model={model_of(asked)}"
    pictures = [{"type": "input_image", "image_url": each} for each in items(asked, "image_url")]
    content = [{"type": "input_text", "text": asked.prompt}, *pictures]
    response = {"max_output_tokens": asked.output_len} if asked.output_len else {}
    sound = output.hear()
    async with _connect(session, url, asked) as socket:
        settings = {"type": "realtime", **(asked.extra_body or {})}
        item = {"type": "message", "role": "user", "content": content}
        await socket.send_json({"type": "session.update", "session": settings})
        await socket.send_json({"type": "conversation.item.create", "item": item})
        await socket.send_json({"type": "response.create", "response": response})
        async for now, event in _events(socket):
            assert not isinstance(event, bytes)
            if event["type"] in TEXTS:
                output.read(now, event["delta"])
            elif event["type"] == "response.output_audio.delta":
                sound.add(now, len(base64.b64decode(event["delta"])) * 8 // BITS, RATE)
            elif event["type"] == "response.done":
                _finish(output, event["response"])
                break
        output.ended()
    if not output.heard():
        raise AnswerError("the answer has no sound")
    output.sound_took_s = sound.last


def _connect(session: aiohttp.ClientSession, url: str, asked: RequestFuncInput) -> Any:
    return session.ws_connect(url, headers=headers_of(asked), max_msg_size=0)


async def _events(
    socket: aiohttp.ClientWebSocketResponse,
) -> AsyncIterator[tuple[float, bytes | dict[str, Any]]]:
    """What the server sends and when each came; raises `AnswerError` at its errors and its end."""
    while True:
        message = await socket.receive()
        now = time.perf_counter()
        if message.type in CLOSED:
            raise AnswerError(f"the server closed the socket: {socket.close_code} {message.extra}")
        if message.type == aiohttp.WSMsgType.BINARY:
            yield now, message.data
            continue
        event = message.json()
        if event["type"] == "error":
            raise AnswerError(str(event.get("error") or event)[:MAX_TOLD])
        yield now, event


def _finish(output: OmniOutput, response: dict[str, Any]) -> None:
    if response["status"] not in ("completed", "incomplete"):
        raise AnswerError(f"the response has {response['status']}: {response}"[:MAX_TOLD])
    usage = response.get("usage") or {}
    output.output_tokens = usage.get("output_tokens") or 0
    output.prompt_len = usage.get("input_tokens") or output.prompt_len
