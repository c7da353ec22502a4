# SPDX-License-Identifier: Apache-2.0
"""One WebSocket of `/v1/realtime`: takes events, answers them, runs one response at a time."""

import asyncio
from contextlib import aclosing
from typing import Any, Literal

from openai.types.realtime import (
    ConversationItemAdded,
    ConversationItemDeletedEvent,
    ConversationItemDone,
    InputAudioBufferClearedEvent,
    InputAudioBufferCommittedEvent,
    RealtimeError,
    RealtimeErrorEvent,
    RealtimeServerEvent,
)
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.exceptions import VLLMClientError
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.protocol.realtime import (
    CLIENT_EVENTS,
    AudioAppend,
    AudioClear,
    AudioCommit,
    ClientEvent,
    ItemCreate,
    ItemDelete,
    ResponseCancel,
    ResponseCreate,
    SessionEvent,
    SessionUpdate,
)
from vllm_omni.entrypoints.openai.realtime.conversation import (
    Conversation,
    Entry,
    entry_of,
    new_id,
)
from vllm_omni.entrypoints.openai.realtime.errors import (
    Code,
    EventError,
    SessionEnd,
    invalid_event,
)
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits
from vllm_omni.entrypoints.openai.realtime.response import Response
from vllm_omni.entrypoints.openai.realtime.settings import Settings
from vllm_omni.entrypoints.openai.realtime.socket import INTERNAL, EventSocket, event_of
from vllm_omni.entrypoints.openai.serving_chat import OmniServingChat
from vllm_omni.entrypoints.openai.turn import read_turn
from vllm_omni.errors import OmniClientError

logger = init_logger(__name__)

_PROBE = [{"role": "user", "content": "-"}]


class RealtimeSession:
    """A session.

    Args:
        websocket: Accepted.
        handler: Answers.
        limits: What the client may do.
    """

    def __init__(
        self, websocket: WebSocket, handler: OmniServingChat, limits: RealtimeLimits
    ) -> None:
        self.id = new_id("sess")
        self._socket = EventSocket(websocket, limits, self.id)
        self._handler = handler
        self._limits = limits
        self._conversation = Conversation(limits.max_session_bytes)
        self._conversation_id = new_id("conv")
        self._settings = Settings()
        self._model: str | None = None
        self._response: Response | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self, model: str | None) -> None:
        """Serve until the client leaves or breaks a limit; whatever runs then is aborted.

        Args:
            model: From the URL.
        """
        logger.debug("Realtime session %s begins", self.id)
        try:
            await self._serve(model)
        except WebSocketDisconnect:
            pass
        except SessionEnd as end:
            await self.refuse(end)
        except Exception:
            logger.exception("Realtime session %s failed", self.id)
            await self._socket.close(INTERNAL, "internal error")
        finally:
            await self._stop_response()
            logger.debug("Realtime session %s ended", self.id)

    async def _serve(self, model: str | None) -> None:
        await self._send(self._event("session.created", model))
        if model is not None:
            await self._answer(SessionUpdate(model=model), announced=False)
        receiving: asyncio.Future[Any] | None = None
        try:
            while True:
                receiving = receiving or asyncio.ensure_future(self._socket.receive())
                waits: set[asyncio.Future[Any]] = {receiving}
                if self._task is not None:
                    waits.add(self._task)
                done, _ = await asyncio.wait(
                    waits,
                    timeout=self._limits.idle_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._task is not None and self._task.done():
                    task, self._task = self._task, None
                    task.result()
                if receiving in done:
                    message, receiving = receiving.result(), None
                    await self._take(message)
                elif not done and self._task is None:
                    raise self._socket.idle()
        finally:
            if receiving is not None:
                receiving.cancel()

    async def _take(self, message: dict[str, Any]) -> None:
        try:
            raw = self._socket.decoded(message)
        except SessionEnd:
            raise
        except EventError as error:
            await self._send_error(error, None)
            return
        event_id = raw.get("event_id") if isinstance(raw, dict) else None
        try:
            await self._answer(event_of(raw, CLIENT_EVENTS))
        except SessionEnd:
            raise
        except OmniClientError as error:
            await self._send_error(error, event_id if isinstance(event_id, str) else None)

    async def _answer(self, event: ClientEvent, announced: bool = True) -> None:
        match event:
            case SessionUpdate():
                await self._update(event, announced)
            case AudioAppend(audio=audio):
                self._conversation.append_sound(audio)
            case AudioClear():
                self._conversation.clear_sound()
                await self._send(
                    InputAudioBufferClearedEvent(
                        event_id=new_id("event"), type="input_audio_buffer.cleared"
                    )
                )
            case AudioCommit():
                await self._commit()
            case ItemCreate(item=item):
                previous = self._conversation.last_id
                entry = entry_of(item, self._settings.input_rate)
                self._conversation.add(entry)
                await self._send_item(entry, previous)
            case ItemDelete(item_id=item_id):
                self._conversation.delete(item_id)
                await self._send(
                    ConversationItemDeletedEvent(
                        event_id=new_id("event"), type="conversation.item.deleted", item_id=item_id
                    )
                )
            case ResponseCreate():
                await self._start_response(event)
            case ResponseCancel(response_id=response_id):
                await self._cancel_response(response_id)

    # Session.

    async def _update(self, event: SessionUpdate, announced: bool) -> None:
        model = event.model or event.session.model or self._model
        if model is None:
            raise EventError(Code.INVALID_EVENT, "Missing required field: model", "model")
        models = self._handler.models
        if not models.is_base_model(model) and model not in models.lora_requests:
            if announced:
                raise _no_model(model)
            await self._send_error(_no_model(model), None)
            return
        settings = self._settings.updated(event.session)
        self._check(settings, model)
        self._model, self._settings = model, settings
        if announced:
            await self._send(self._event("session.updated", model))

    def _check(self, settings: Settings, model: str) -> None:
        """Have the chat's own checks look at the choices.

        Raises:
            EventError: Names the field.
        """
        try:
            read_turn(settings.chat_request(model, _PROBE, "-"), self._handler.engine_client)
        except ValidationError as error:
            raise invalid_event(error) from None
        except OmniClientError as error:
            raise EventError(Code.INVALID_EVENT, error.message, error.param) from None
        except VLLMClientError as error:
            raise EventError(Code.INVALID_EVENT, str(error)) from None

    def _event(
        self, kind: Literal["session.created", "session.updated"], model: str | None
    ) -> SessionEvent:
        session = self._settings.described(self.id, model)
        return SessionEvent(event_id=new_id("event"), type=kind, session=session)

    def _validated_model(self) -> str:
        if self._model is None:
            raise EventError(
                Code.MODEL_NOT_VALIDATED,
                "Model not validated. Send a session.update event first to validate the model.",
                "model",
            )
        return self._model

    # Items.

    async def _commit(self) -> None:
        self._validated_model()
        previous = self._conversation.last_id
        entry = self._conversation.commit_sound(self._settings.input_rate)
        await self._send(
            InputAudioBufferCommittedEvent(
                event_id=new_id("event"),
                type="input_audio_buffer.committed",
                item_id=entry.id,
                previous_item_id=previous,
            )
        )
        await self._send_item(entry, previous)

    async def _send_item(self, entry: Entry, previous: str | None) -> None:
        for kind, name in (
            (ConversationItemAdded, "conversation.item.added"),
            (ConversationItemDone, "conversation.item.done"),
        ):
            await self._send(
                kind(
                    event_id=new_id("event"),
                    type=name,
                    previous_item_id=previous,
                    item=entry.shown,
                )
            )

    # Responses.

    async def _start_response(self, event: ResponseCreate) -> None:
        model = self._validated_model()
        if self._response is not None:
            raise EventError(
                Code.RESPONSE_ACTIVE, f"Response {self._response.id} is still in progress"
            )
        messages = self._conversation.messages()
        if not messages:
            raise EventError(Code.INVALID_EVENT, "The conversation is empty: create an item first")
        settings = self._settings.updated(event.response)
        self._check(settings, model)
        response = Response(settings, self._conversation_id, self._conversation.last_id)
        self._response = response
        await self._send(response.created())
        self._task = asyncio.create_task(self._run_response(response, model, messages))

    async def _run_response(
        self, response: Response, model: str, messages: list[dict[str, Any]]
    ) -> None:
        async with aclosing(response.events(self._handler, model, messages)) as events:
            async for event in events:
                await self._send(event)
        await self._end_response(response)

    async def _end_response(self, response: Response) -> None:
        self._response = None
        if (entry := response.entry()) is not None:
            try:
                self._conversation.add(entry)
            except EventError as error:  # full, or the client took its id meanwhile
                await self._send_error(error, None)
        for event in response.ending():
            await self._send(event)

    async def _cancel_response(self, response_id: str | None) -> None:
        response = self._response
        if response is None or response_id not in (None, response.id):
            raise EventError(
                Code.RESPONSE_NOT_ACTIVE, "There is no such response in progress", "response_id"
            )
        await self._stop_response()
        if self._response is response:
            response.cancel()
            await self._end_response(response)

    async def _stop_response(self) -> None:
        """Abort what runs; its generator ends with its task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("Realtime session %s: its response ended by %r", self.id, error)

    # Sending.

    async def _send(self, event: RealtimeServerEvent | SessionEvent) -> None:
        await self._socket.send(event.model_dump_json(exclude_none=True))

    async def _send_error(self, error: OmniClientError, event_id: str | None) -> None:
        """OpenAI's error, with vLLM's `code` beside it."""
        await self._send(
            RealtimeErrorEvent(
                event_id=new_id("event"),
                type="error",
                error=RealtimeError(
                    type=error.error_type,
                    code=error.code,
                    message=error.message,
                    param=error.param,
                    event_id=event_id,
                ),
                code=error.code,
            )
        )

    async def refuse(self, end: SessionEnd) -> None:
        """Tell the client why, and close."""
        logger.info("Realtime session %s is closed: %s", self.id, end.message)
        try:
            await self._send_error(end, None)
            await self._socket.close(end.close_code, str(end.code))
        except WebSocketDisconnect:
            pass  # it had left already


def _no_model(model: str) -> EventError:
    return EventError(Code.MODEL_NOT_FOUND, f"The model `{model[:200]}` does not exist.", "model")
