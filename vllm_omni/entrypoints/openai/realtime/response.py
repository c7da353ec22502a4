# SPDX-License-Identifier: Apache-2.0
"""One response of a realtime session: the chat handler's chunks as realtime events."""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal

from openai.types.realtime import (
    ConversationItemAdded,
    ConversationItemDone,
    RealtimeResponse,
    RealtimeServerEvent,
    ResponseAudioDeltaEvent,
    ResponseAudioDoneEvent,
    ResponseAudioTranscriptDeltaEvent,
    ResponseAudioTranscriptDoneEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseDoneEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.protocol.realtime import OUTPUT_RATE
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Entry,
    Status,
    answer_entry,
    new_id,
)
from vllm_omni.entrypoints.openai.realtime.settings import Settings
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.logs import current_request_id

logger = init_logger(__name__)

Outcome = Literal["completed", "incomplete", "cancelled", "failed"]
_DATA = "data: "
_DONE = "[DONE]"


class Response:
    """A response that is being made.

    Args:
        settings: What it should be like.
        conversation_id: Of the session.
        previous_item_id: The item that it answers.
    """

    def __init__(
        self, settings: Settings, conversation_id: str, previous_item_id: str | None
    ) -> None:
        self.id = new_id("resp")
        self.item_id = new_id("item")
        self._settings = settings
        self._conversation_id = conversation_id
        self._previous_item_id = previous_item_id
        self._place = {"response_id": self.id, "item_id": self.item_id, "output_index": 0}
        self._text = ""
        self._started = False
        self._outcome: Outcome = "completed"
        self._details: dict[str, Any] = {}
        self._usage: dict[str, int] | None = None

    async def events(
        self, handler: OmniServingChat, model: str, messages: list[dict[str, Any]]
    ) -> AsyncGenerator[RealtimeServerEvent, None]:
        """Run it; all events but the first and those of the end."""
        try:
            # The id of the WebSocket's request comes first, so that its lines are found by it.
            request_id = "-".join(filter(None, (current_request_id(), self.id)))
            request = self._settings.chat_request(model, messages, request_id)
            chat = await handler.create_chat_completion(request)
        except Exception as error:  # whatever it is, the response fails and the session goes on
            self._fail(handler.create_error_response(error), error)
            return
        if isinstance(chat, ErrorResponse):
            self._fail(chat)
            return
        assert isinstance(chat, AsyncGenerator)
        async with aclosing(chat):
            async for event in chat:
                data = event.strip().removeprefix(_DATA)
                if data != _DONE:
                    for made in self._feed(json.loads(data)):
                        yield made

    def created(self) -> RealtimeServerEvent:
        """The first event."""
        return ResponseCreatedEvent(
            event_id=new_id("event"),
            type="response.created",
            response=self._described("in_progress", []),
        )

    def cancel(self) -> None:
        """The client wants no more of it."""
        self._outcome = "cancelled"
        self._details = {"reason": "client_cancelled"}

    def entry(self) -> Entry | None:
        """What it adds to the conversation."""
        if not self._started:
            return None
        status: Status = "completed" if self._outcome == "completed" else "incomplete"
        return answer_entry(self.item_id, self._text, self._settings.speaks, status)

    def ending(self) -> Iterator[RealtimeServerEvent]:
        """The last events."""
        entry = self.entry()
        if entry is not None:
            yield from self._part_ending()
            yield ResponseOutputItemDoneEvent(
                event_id=new_id("event"),
                type="response.output_item.done",
                response_id=self.id,
                output_index=0,
                item=entry.shown,
            )
            yield ConversationItemDone(
                event_id=new_id("event"),
                type="conversation.item.done",
                previous_item_id=self._previous_item_id,
                item=entry.shown,
            )
        yield ResponseDoneEvent(
            event_id=new_id("event"),
            type="response.done",
            response=self._described(self._outcome, [entry.shown] if entry else []),
        )

    def _feed(self, chunk: dict[str, Any]) -> Iterator[RealtimeServerEvent]:
        if "error" in chunk:
            self._fail(ErrorResponse.model_validate(chunk))
            return
        if usage := chunk.get("usage"):
            self._usage = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
            }
        for choice in chunk["choices"]:
            if not self._started:
                self._started = True
                yield from self._opening()
            yield from self._deltas(choice["delta"])
            if choice.get("finish_reason") == "length":
                self._outcome = "incomplete"
                self._details = {"reason": "max_output_tokens"}

    def _deltas(self, delta: dict[str, Any]) -> Iterator[RealtimeServerEvent]:
        audio = delta.get("audio") or {}
        text = audio.get("transcript") if self._settings.speaks else delta.get("content")
        if text:
            self._text += text
            kind: Any = ResponseTextDeltaEvent
            name = "response.output_text.delta"
            if self._settings.speaks:
                kind = ResponseAudioTranscriptDeltaEvent
                name = "response.output_audio_transcript.delta"
            yield kind(
                event_id=new_id("event"), type=name, content_index=0, delta=text, **self._place
            )
        if data := audio.get("data"):
            yield ResponseAudioDeltaEvent(
                event_id=new_id("event"),
                type="response.output_audio.delta",
                content_index=0,
                delta=data,
                **self._place,
            )

    def _opening(self) -> Iterator[RealtimeServerEvent]:
        item = answer_entry(self.item_id, "", self._settings.speaks, "in_progress").shown
        item.content = []
        yield ResponseOutputItemAddedEvent(
            event_id=new_id("event"),
            type="response.output_item.added",
            response_id=self.id,
            output_index=0,
            item=item,
        )
        yield ConversationItemAdded(
            event_id=new_id("event"),
            type="conversation.item.added",
            previous_item_id=self._previous_item_id,
            item=item,
        )
        yield ResponseContentPartAddedEvent(
            event_id=new_id("event"),
            type="response.content_part.added",
            content_index=0,
            part=self._part(""),
            **self._place,
        )

    def _part_ending(self) -> Iterator[RealtimeServerEvent]:
        common = {"content_index": 0, **self._place}
        if self._settings.speaks:
            yield ResponseAudioDoneEvent(
                event_id=new_id("event"), type="response.output_audio.done", **common
            )
            yield ResponseAudioTranscriptDoneEvent(
                event_id=new_id("event"),
                type="response.output_audio_transcript.done",
                transcript=self._text,
                **common,
            )
        else:
            yield ResponseTextDoneEvent(
                event_id=new_id("event"),
                type="response.output_text.done",
                text=self._text,
                **common,
            )
        yield ResponseContentPartDoneEvent(
            event_id=new_id("event"),
            type="response.content_part.done",
            part=self._part(self._text),
            **common,
        )

    def _part(self, text: str) -> Any:
        if self._settings.speaks:
            return {"type": "audio", "transcript": text}
        return {"type": "text", "text": text}

    def _described(self, status: str, output: list[Any]) -> RealtimeResponse:
        described: dict[str, Any] = {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "output": output,
            "conversation_id": self._conversation_id,
            "output_modalities": list(self._settings.modalities),
            "max_output_tokens": self._settings.max_tokens or "inf",
            "audio": {
                "output": {
                    "format": {"type": "audio/pcm", "rate": OUTPUT_RATE},
                    "voice": self._settings.voice,
                }
            },
            "usage": self._usage,
        }
        if status != "in_progress":
            described["status_details"] = {"type": status, **self._details}
        return RealtimeResponse(**described)

    def _fail(self, response: ErrorResponse, cause: Exception | None = None) -> None:
        error = response.error
        if error.code >= 500:
            logger.error("Realtime response %s failed: %s", self.id, error.message, exc_info=cause)
        self._outcome = "failed"
        self._details = {
            "error": {"type": error.type, "message": error.message, "code": str(error.code)}
        }
