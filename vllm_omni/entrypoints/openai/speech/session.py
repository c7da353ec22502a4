# SPDX-License-Identifier: Apache-2.0
"""One WebSocket of `/v1/audio/speech/stream`: text comes in pieces, and is spoken in pieces."""

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.error_handlers import error_object
from vllm_omni.entrypoints.openai.protocol.speech_stream import (
    SPEECH_EVENTS,
    InputDone,
    InputText,
    SessionClose,
    SessionConfig,
    SpeechEvent,
)
from vllm_omni.entrypoints.openai.realtime.conversation import new_id
from vllm_omni.entrypoints.openai.realtime.errors import Code, EventError, SessionEnd
from vllm_omni.entrypoints.openai.realtime.limits import RealtimeLimits
from vllm_omni.entrypoints.openai.realtime.sessions import Sessions
from vllm_omni.entrypoints.openai.realtime.socket import INTERNAL, NORMAL, EventSocket, event_of
from vllm_omni.entrypoints.openai.speech.answers import CHANNELS
from vllm_omni.entrypoints.openai.speech.service import Speech
from vllm_omni.entrypoints.openai.speech.utterance import Utterance
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.splitting import TextSplitter
from vllm_omni.speech.text import is_speakable

logger = init_logger(__name__)

MAX_WAITING = 64 * 1024
"""Characters that may wait to be spoken."""
MAX_CONFIGS = 8
"""Configs that may wait for their text to be spoken: each may hold a recording."""
LONG_TEXT = 4096
"""Characters from which on text is cut in a thread."""
CONFIG = "session.config"


class _Mark(Enum):
    """What stands between the pieces of text."""

    DONE = "done"
    CLOSE = "close"


@dataclass(slots=True, eq=False)
class _Settings:
    """How text is to be spoken, and how many pieces of it wait."""

    config: SessionConfig
    pieces: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text, and how it is to be spoken."""

    text: str
    settings: _Settings

    @property
    def config(self) -> SessionConfig:
        return self.settings.config


class SpeechSession:
    """A session.

    Args:
        websocket: Accepted.
        speech: Who speaks.
        limits: What the client may do.
    """

    def __init__(self, websocket: WebSocket, speech: Speech, limits: RealtimeLimits) -> None:
        self.id = new_id("speech")
        self._socket = EventSocket(websocket, limits, self.id)
        self._limits = limits
        self._speech = speech
        self._asking = speech.asking()
        self._settings = _Settings(SessionConfig())
        self._refused = False
        self._splitter = self._new_splitter()
        self._queue: asyncio.Queue[_Piece | _Mark] = asyncio.Queue()
        self._waiting = 0
        self._spoken = 0
        self._used: set[_Settings] = set()
        self._closing = False

    async def run(self, model: str | None) -> None:
        """Serve until the client leaves or breaks a limit; whatever is spoken then is aborted.

        Args:
            model: From the URL.
        """
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._listen(model))
                await self._speak()
                listening.cancel()
        except* WebSocketDisconnect:
            logger.debug("Session %s: its client left", self.id)
        except* SessionEnd as ends:
            await self.refuse(ends.exceptions[0])
        except* Exception:
            logger.exception("Session %s failed", self.id)
            await self._socket.close(INTERNAL, "internal error")

    async def refuse(self, end: BaseException) -> None:
        """Tell the client why, and close."""
        assert isinstance(end, SessionEnd)
        logger.info("Session %s is closed: %s", self.id, end.message)
        try:
            await self._send_error(end)
            await self._socket.close(end.close_code, str(end.code))
        except WebSocketDisconnect:
            pass  # it had left already

    # Listening.

    async def _listen(self, model: str | None) -> None:
        if model is not None:
            await self._answered(lambda: {"type": CONFIG, "model": model})
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_timeout_s):
                    message = await self._socket.receive()
            except TimeoutError:
                if self._waiting or not self._queue.empty():
                    continue
                raise self._socket.idle() from None
            await self._answered(partial(self._socket.decoded, message))

    async def _answered(self, read: Callable[[], Any]) -> None:
        """Take an event; what is wrong with it is told, and the session goes on."""
        try:
            refused, self._refused = self._refused, True
            raw = read()
            # What cannot be told from a config counts as one that was refused: the text after it
            # must not be spoken by the one before it.
            if isinstance(raw, dict) and raw.get("type", CONFIG) != CONFIG:
                self._refused = refused
            await self._take(event_of(raw, SPEECH_EVENTS))
        except SessionEnd:
            raise
        except OmniClientError as error:
            await self._send_error(error)

    async def _take(self, event: SpeechEvent) -> None:
        if self._closing:
            raise EventError(Code.INVALID_EVENT, "The session is closing", "type")
        match event:
            case SessionConfig():
                await self._configure(event)
            case InputText(text=text):
                await self._add(text)
            case InputDone():
                self._end_text()
            case SessionClose():
                if len(self._splitter):
                    self._end_text()
                self._closing = True
                self._queue.put_nowait(_Mark.CLOSE)

    async def _configure(self, config: SessionConfig) -> None:
        if len(self._splitter):
            raise EventError(Code.INVALID_EVENT, "Text is waiting: send input.done first", CONFIG)
        if len(self._used) >= MAX_CONFIGS:
            raise EventError(
                Code.SESSION_FULL,
                f"{MAX_CONFIGS} settings wait for their text to be spoken; wait for session.done",
                CONFIG,
            )
        self._speech.served_name(config.model)
        await self._asking.asked("a", config)  # all that can be wrong with it
        self._settings = _Settings(config)
        self._refused = False
        self._splitter = self._new_splitter()

    def _new_splitter(self) -> TextSplitter:
        config = self._settings.config
        granularity = "none" if self._commits else config.split_granularity
        return TextSplitter(granularity, self._speech.limits.max_input)

    @property
    def _commits(self) -> bool:
        return self._settings.config.text_input_mode == "commitment"

    async def _add(self, text: str) -> None:
        if self._refused:
            raise EventError(
                Code.INVALID_EVENT,
                "The last session.config was refused: send one that holds before its text",
                CONFIG,
            )
        self._check_room(len(text))
        feed = self._splitter.feed
        pieces = feed(text) if len(text) < LONG_TEXT else await asyncio.to_thread(feed, text)
        if self._commits:
            pieces += self._splitter.flush()
        self._put(pieces)

    def _end_text(self) -> None:
        if not len(self._splitter):  # the end of a text always has room, marks alone have not
            self._check_room(1)
        self._put(self._splitter.flush())
        self._waiting += 1
        self._queue.put_nowait(_Mark.DONE)

    def _check_room(self, characters: int) -> None:
        waiting = self._waiting + len(self._splitter)
        if waiting + characters > MAX_WAITING:
            raise EventError(
                Code.SESSION_FULL,
                f"{waiting} characters wait to be spoken and {characters} more came; at most "
                f"{MAX_WAITING} may wait",
                "text",
            )

    def _put(self, pieces: list[str]) -> None:
        for text in pieces:
            if is_speakable(text):
                self._waiting += len(text)
                self._settings.pieces += 1
                self._used.add(self._settings)
                self._queue.put_nowait(_Piece(text, self._settings))

    # Speaking.

    async def _speak(self) -> None:
        """Speak what comes until the session is to end."""
        index = 0
        while True:
            match await self._queue.get():
                case _Piece() as piece:
                    await self._say(index, piece)
                    index += 1
                    self._spoken_of(piece)
                case _Mark.DONE:
                    self._waiting -= 1
                    await self._send("session.done", total_sentences=index)
                    index = 0
                case _Mark.CLOSE:
                    await self._socket.close(NORMAL, "closed")
                    return

    def _spoken_of(self, piece: _Piece) -> None:
        """A piece waits no more; nor do its settings, if it was the last of theirs."""
        self._waiting -= len(piece.text)
        piece.settings.pieces -= 1
        if not piece.settings.pieces:
            self._used.discard(piece.settings)

    async def _say(self, index: int, piece: _Piece) -> None:
        self._spoken += 1
        request_id = f"{self.id}-{self._spoken}"
        try:
            asked = await self._asking.asked(piece.text.strip(), piece.config)
            utterance = Utterance(self._speech, asked, request_id)
            nbytes = await self._send_sound(index, piece, utterance)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # the client is told, and the next piece is spoken
            body = error_object(error, request_id)["error"]
            body["code"] = _code(error)
            await self._send("error", message=body["message"], error=body, sentence_index=index)
            await self._send("audio.done", sentence_index=index, total_bytes=0, error=True)
            return
        await self._send(
            "audio.done",
            sentence_index=index,
            total_bytes=nbytes,
            error=False,
            usage=utterance.usage.model_dump(),
        )

    async def _send_sound(self, index: int, piece: _Piece, utterance: Utterance) -> int:
        """Send `audio.start` and the sound; its bytes."""
        if not piece.config.stream_audio:
            data = await utterance.file()
            await self._start(index, piece, utterance)
            await self._socket.send(data)
            return len(data)
        nbytes = 0
        async with aclosing(utterance.pieces()) as pieces:
            async for data in pieces:
                if not nbytes:
                    await self._start(index, piece, utterance)
                await self._socket.send(data)
                nbytes += len(data)
        return nbytes

    async def _start(self, index: int, piece: _Piece, utterance: Utterance) -> None:
        await self._send(
            "audio.start",
            sentence_index=index,
            sentence_text=piece.text,
            format=piece.config.format,
            sample_rate=utterance.sample_rate,
            channels=CHANNELS,
        )

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}, ensure_ascii=False))

    async def _send_error(self, error: OmniClientError) -> None:
        about = {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": _code(error),
        }
        await self._send("error", message=error.message, error=about)


def _code(error: Exception) -> str:
    """`error.code` of a session's event, always a word."""
    if isinstance(error, OmniClientError):
        return error.code or Code.INVALID_REQUEST
    return Code.INTERNAL


def speech_sessions(speech: Speech, limits: RealtimeLimits) -> Sessions:
    """Those of `/v1/audio/speech/stream`."""
    return Sessions(lambda websocket: SpeechSession(websocket, speech, limits), limits, "speech")
