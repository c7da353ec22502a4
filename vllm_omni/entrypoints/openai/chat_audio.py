# SPDX-License-Identifier: Apache-2.0
"""Sound in chat responses, in OpenAI's shape (API.md section 4).

vLLM's generators make everything about text: logprobs, tools, reasoning, usage. They are given the
text outputs only; the sound is taken out of the engine's stream on the way and put beside.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
from openai.types.chat.chat_completion_audio import ChatCompletionAudio
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.outputs import RequestOutput

from vllm_omni.entrypoints.openai.protocol.chat import (
    AudioMetadata,
    OmniChatCompletionResponse,
    OmniChatCompletionResponseChoice,
)
from vllm_omni.entrypoints.openai.turn import Turn
from vllm_omni.media.audio_encode import AudioStreamEncoder, encode
from vllm_omni.outputs import AudioOutput, OmniRequestOutput

# Events that may wait for the client; the rest waits, bounded, in the engine client's stream.
MAX_EVENTS = 16
# The rate of a file without any sample: the model said nothing, so nobody told the rate.
SILENT_RATE = 24_000


class AudioCollector:
    """Takes the sound out of an engine's stream, for a response in one piece."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.pieces: list[AudioOutput] = []

    async def text(self, outputs: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        """Pass the text outputs on and keep the sound."""
        async for output in outputs:
            if note(self.turn, output) is None:
                yield output
            elif output.audio is not None:
                self.pieces.append(output.audio)

    async def finish(self, response: ChatCompletionResponse) -> OmniChatCompletionResponse:
        """Put the sound into vLLM's response."""
        fields = dict(response)
        fields["choices"] = [
            OmniChatCompletionResponseChoice(**dict(choice)) for choice in response.choices
        ]
        fields["metrics"] = dict(response.metrics) if response.metrics else None
        result = OmniChatCompletionResponse(**fields)
        if self.turn.has_audio:
            await self._attach(result.choices[0])
        if self.turn.wants_metrics:
            result.metrics = (result.metrics or {}) | self.turn.metrics()
        return result

    async def _attach(self, choice: OmniChatCompletionResponseChoice) -> None:
        turn, message = self.turn, choice.message
        rate = self.pieces[0].sample_rate if self.pieces else SILENT_RATE
        data, frames = await asyncio.to_thread(self._encoded, rate)
        turn.transcript = message.content or ""
        message.audio = ChatCompletionAudio(
            id=turn.audio_id,
            data=data,
            expires_at=turn.expires_at,
            transcript=turn.transcript,
        )
        if not turn.has_text:
            message.content = None
        choice.modality = "audio"
        choice.audio_metadata = AudioMetadata(
            format=turn.audio_format, sample_rate_hz=rate, frame_count=frames
        )

    def _encoded(self, rate: int) -> tuple[str, int]:
        pieces = [piece.samples for piece in self.pieces]
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        encoded = encode(samples, rate, self.turn.audio_format)
        return base64.b64encode(encoded).decode("ascii"), len(samples)


def note(turn: Turn, output: RequestOutput) -> OmniRequestOutput | None:
    """Remember the stages' timing; the output itself if it is sound, None if it is text."""
    if not isinstance(output, OmniRequestOutput):
        return None
    if output.stage_metrics:
        turn.stage_metrics = output.stage_metrics
    return output if output.final_output_type == "audio" else None


class AudioStream:
    """Weaves the sound of a turn into the server-sent events of its text.

    One task reads the engine: text goes to vLLM's generator, sound is encoded. One task drives
    vLLM's generator. Both put their events into one queue, so the client gets them in the order
    in which they came to be; both wait while it is full. The text ends for vLLM's generator when
    the whole request has ended, which makes its closing events (usage, `[DONE]`) the last ones.
    """

    def __init__(self, turn: Turn, request_id: str, model: str, created: int) -> None:
        self.turn = turn
        self._base = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._text: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue(MAX_EVENTS)
        self._events: asyncio.Queue[str | Exception | None] = asyncio.Queue(MAX_EVENTS)
        self._encoder: AudioStreamEncoder | None = None
        self._closing: dict[str, Any] | None = None
        self._owes_metrics = turn.wants_metrics

    async def text(self) -> AsyncIterator[RequestOutput]:
        """What vLLM's generator reads."""
        while (item := await self._text.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def events(
        self, outputs: AsyncGenerator[RequestOutput, None], chat: AsyncGenerator[str, None]
    ) -> AsyncGenerator[str, None]:
        """All events of the response.

        Args:
            outputs: The engine's outputs of the request.
            chat: vLLM's generator over `text()`.
        """
        reader = asyncio.create_task(self._read_engine(outputs))
        driver = asyncio.create_task(self._drive_chat(chat))
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            # A cancelled task closes its own generator, which aborts the request. Nothing is
            # awaited here: on a client's disconnect this generator runs in a cancelled scope.
            reader.cancel()
            driver.cancel()

    async def _read_engine(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if (sound := note(self.turn, output)) is None:
                        await self._text.put(output)
                    else:
                        await self._add_sound(sound)
        except Exception as error:  # raised again in vLLM's generator by `text`
            end = error
        await self._text.put(end)

    async def _drive_chat(self, chat: AsyncGenerator[str, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(chat):
                async for event in chat:
                    for rewritten in self._rewrite(event):
                        await self._events.put(rewritten)
        except Exception as error:  # raised again by `events`
            end = error
        await self._events.put(end)

    async def _add_sound(self, output: OmniRequestOutput) -> None:
        audio = output.audio
        if audio is not None and self._encoder is None:
            self._encoder = AudioStreamEncoder(self.turn.audio_format, audio.sample_rate)
        if self._encoder is None:
            return
        encoder, frames = self._encoder, 0
        data = b""
        if audio is not None and len(audio.samples):
            frames = len(audio.samples)
            data += await asyncio.to_thread(encoder.feed, audio.samples)
        if output.finished:
            data += await asyncio.to_thread(encoder.finish)
        if not data:
            return
        metadata = {
            "format": self.turn.audio_format,
            "sample_rate_hz": encoder.sample_rate,
            "channels": 1,
            "frame_count": frames,
        }
        sound = {"id": self.turn.audio_id, "data": base64.b64encode(data).decode("ascii")}
        await self._events.put(self._chunk({"audio": sound}, "audio", audio_metadata=metadata))

    def _rewrite(self, event: str) -> list[str]:
        """Add the sound's fields to an event of vLLM's; hold its finish back until the sound's."""
        if not event.startswith("data: {"):
            return [*self._close(), event]
        chunk = json.loads(event[len("data: ") :])
        if "error" in chunk:
            self._closing, self._owes_metrics = None, False
            return [event]
        if not chunk["choices"]:
            return [*self._close(), event]
        chunk["modality"] = "text"
        if self.turn.has_audio:
            choice = chunk["choices"][0]
            self._hold_finish(choice)
            self._add_transcript(choice["delta"])
        return [_event(chunk)]

    def _hold_finish(self, choice: dict[str, Any]) -> None:
        if choice.get("finish_reason") is None:
            return
        names = ("finish_reason", "stop_reason")
        self._closing = {name: choice.pop(name) for name in names if name in choice}
        choice["finish_reason"] = None

    def _add_transcript(self, delta: dict[str, Any]) -> None:
        transcript = delta.get("content")
        if not self.turn.has_text:
            delta.pop("content", None)
        if transcript:
            self.turn.transcript += transcript
            delta["audio"] = {"id": self.turn.audio_id, "transcript": transcript}

    def _close(self) -> list[str]:
        """What follows the last piece of text and sound, once."""
        events = []
        if self._closing is not None:
            audio = {"id": self.turn.audio_id, "expires_at": self.turn.expires_at}
            events.append(self._chunk({"audio": audio}, "audio", **self._closing))
        if self._owes_metrics:
            chunk = self._base | {"choices": [], "metrics": self.turn.metrics()}
            events.append(_event(chunk))
        self._closing, self._owes_metrics = None, False
        return events

    def _chunk(self, delta: dict[str, Any], modality: str, **choice_fields: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": None} | choice_fields
        return _event(self._base | {"choices": [choice], "modality": modality})


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
