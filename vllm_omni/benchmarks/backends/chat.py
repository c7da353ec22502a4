# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions`, streamed, with sound beside the text."""

import base64
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.benchmarks.backends.calling import AnswerError, check, events, model_of, post
from vllm_omni.benchmarks.backends.media import parts
from vllm_omni.benchmarks.backends.pcm import BITS, RATE
from vllm_omni.benchmarks.outputs import OmniOutput, Sound

SOUND = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}


async def chat(asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput) -> None:
    """Ask for an answer in text and sound, unless `--extra-body` has other `modalities`."""
    body = _body(asked)
    answer = _Answer(output, output.hear() if "audio" in body["modalities"] else None)
    async with post(asked, session, json=body) as response:
        await check(response)
        async for now, event in events(response):
            answer.take(now, event)
        output.ended()
    answer.end()


def _body(asked: RequestFuncInput) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model_of(asked),
        "messages": asked.chat_messages or [{"role": "user", "content": _content(asked)}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **SOUND,
    }
    if asked.output_len:
        body["max_completion_tokens"] = asked.output_len
    if asked.ignore_eos:
        body["ignore_eos"] = True
    return body | (asked.extra_body or {})


def _content(asked: RequestFuncInput) -> list[dict[str, Any]]:
    return [{"type": "text", "text": asked.prompt}, *parts(asked)]


class _Answer:
    """Reads the events of a chat.

    Args:
        output: To be filled.
        sound: Of the answer, if it was asked for.
    """

    def __init__(self, output: OmniOutput, sound: Sound | None) -> None:
        self._output, self._sound = output, sound

    def take(self, now: float, event: dict[str, Any]) -> None:
        """An event came."""
        if usage := event.get("usage"):
            self._output.output_tokens = usage.get("completion_tokens") or 0
            self._output.prompt_len = usage.get("prompt_tokens") or self._output.prompt_len
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            audio = delta.get("audio") or {}
            if text := delta.get("content") or audio.get("transcript"):
                self._output.read(now, text)
            if data := audio.get("data"):
                self._hear(now, data, choice.get("audio_metadata") or {})

    def _hear(self, now: float, data: str, metadata: dict[str, Any]) -> None:
        if self._sound is None:
            raise AnswerError("the answer has a sound that was not asked for")
        self._sound.byte(now)
        rate = int(metadata.get("sample_rate_hz", RATE))
        frames = metadata.get("frame_count")
        if frames is None:
            frames = len(base64.b64decode(data)) * 8 // BITS
        self._sound.add(now, frames, rate)

    def end(self) -> None:
        """The stream is over."""
        if self._sound is None:
            if not self._output.generated_text:
                raise AnswerError("the answer has no text")
            return
        if not self._output.heard():
            raise AnswerError("the answer has no sound")
        self._output.sound_took_s = self._sound.last
