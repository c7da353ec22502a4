# SPDX-License-Identifier: Apache-2.0
"""The conversation of a realtime session, and the chat messages that it amounts to."""

import base64
import binascii
import io
import uuid
import wave
from dataclasses import dataclass
from typing import Any, Literal

import pybase64
from openai.types.realtime import (
    RealtimeConversationItemAssistantMessage,
    RealtimeConversationItemSystemMessage,
    RealtimeConversationItemUserMessage,
)

from vllm_omni.entrypoints.openai.protocol.realtime import ContentPart, Item
from vllm_omni.entrypoints.openai.realtime.errors import Code, EventError

ItemEvent = (
    RealtimeConversationItemUserMessage
    | RealtimeConversationItemAssistantMessage
    | RealtimeConversationItemSystemMessage
)
Status = Literal["completed", "incomplete", "in_progress"]

_EVENT_TYPES: dict[str, type[ItemEvent]] = {
    "user": RealtimeConversationItemUserMessage,
    "assistant": RealtimeConversationItemAssistantMessage,
    "system": RealtimeConversationItemSystemMessage,
}
_BYTES_PER_SAMPLE = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """An item of the conversation.

    Attributes:
        message: As the chat handler takes it.
        shown: As the client is told of it: without the sound.
        nbytes: What it takes of the session's memory.
    """

    id: str
    message: dict[str, Any]
    shown: ItemEvent
    nbytes: int


class Conversation:
    """Items in order, and the sound that has not been committed; bounded together.

    Args:
        max_bytes: Most that they may hold.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[str, Entry] = {}
        self._sound = bytearray()
        self._nbytes = 0

    @property
    def last_id(self) -> str | None:
        """Id of the last item."""
        return next(reversed(self._entries), None)

    def messages(self) -> list[dict[str, Any]]:
        """The items as chat messages."""
        return [entry.message for entry in self._entries.values()]

    def add(self, entry: Entry) -> None:
        """Append an item.

        Raises:
            EventError: Its id is taken, or there is no room.
        """
        if entry.id in self._entries:
            raise EventError(Code.INVALID_EVENT, f"Item {entry.id!r} exists already", "item.id")
        self._reserve(entry.nbytes)
        self._entries[entry.id] = entry

    def delete(self, item_id: str) -> None:
        """Take an item out.

        Raises:
            EventError: There is none of that id.
        """
        entry = self._entries.pop(item_id, None)
        if entry is None:
            raise EventError(Code.INVALID_EVENT, f"Item {item_id!r} does not exist", "item_id")
        self._nbytes -= entry.nbytes

    def append_sound(self, audio: str) -> None:
        """Add sound to the buffer.

        Raises:
            EventError: It is not base64 of 16-bit samples, or there is no room.
        """
        pcm = decode_pcm16(audio, "audio")
        self._reserve(len(pcm))
        self._sound += pcm

    def clear_sound(self) -> None:
        """Empty the buffer."""
        self._nbytes -= len(self._sound)
        self._sound = bytearray()

    def commit_sound(self, rate: int) -> Entry:
        """Make the buffer a message of the user's, and empty it.

        Raises:
            EventError: It is empty, or there is no room.
        """
        if not self._sound:
            raise EventError(Code.COMMIT_EMPTY, "The input audio buffer is empty")
        pcm, held = self._sound, self._nbytes
        part = _sound_part(bytes(pcm), rate)
        self.clear_sound()
        entry = _entry(new_id("item"), "user", [part], [{"type": "input_audio"}])
        try:
            self.add(entry)
        except EventError:  # in base64 it is larger; what the client sent is not lost
            self._sound, self._nbytes = pcm, held
            raise
        return entry

    def _reserve(self, nbytes: int) -> None:
        if self._nbytes + nbytes > self._max_bytes:
            raise EventError(
                Code.SESSION_FULL,
                f"The session holds its {self._max_bytes} bytes (--realtime-max-session-bytes): "
                "delete items or clear the buffer",
            )
        self._nbytes += nbytes


def new_id(prefix: str) -> str:
    """A new id of OpenAI's form."""
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def decode_pcm16(audio: str, param: str) -> bytes:
    """The bytes of a base64 string of 16-bit samples.

    Raises:
        EventError: It is something else, or nothing.
    """
    try:
        pcm = pybase64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EventError(
            Code.INVALID_AUDIO, f"Invalid audio data: not base64 ({error})", param
        ) from None
    if not pcm or len(pcm) % _BYTES_PER_SAMPLE:
        raise EventError(
            Code.INVALID_AUDIO,
            f"Invalid audio data: {len(pcm)} bytes are no 16-bit samples",
            param,
        )
    return pcm


def entry_of(item: Item, rate: int) -> Entry:
    """The entry for an item that a client made.

    Args:
        item: The item.
        rate: Hz of its sound.

    Raises:
        EventError: Names the part at fault.
    """
    parts = [
        _chat_part(item.role, part, f"item.content.{i}", rate)
        for i, part in enumerate(item.content)
    ]
    return _entry(
        item.id or new_id("item"), item.role, parts, [_shown(item.role, p) for p in parts]
    )


def answer_entry(item_id: str, text: str, spoken: bool, status: Status) -> Entry:
    """The entry for what the model said."""
    content = {"type": "output_audio", "transcript": text} if spoken else {}
    shown = [content or {"type": "output_text", "text": text}]
    return _entry(item_id, "assistant", [{"type": "text", "text": text}], shown, status)


def _entry(
    item_id: str,
    role: str,
    parts: list[dict[str, Any]],
    shown: list[dict[str, Any]],
    status: Status = "completed",
) -> Entry:
    content: Any = parts
    if role != "user":
        content = "".join(part["text"] for part in parts)
    event = _EVENT_TYPES[role].model_validate(
        {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "role": role,
            "status": status,
            "content": shown,
        }
    )
    return Entry(item_id, {"role": role, "content": content}, event, _size(parts))


def _size(parts: list[dict[str, Any]]) -> int:
    return sum(
        len(value) if isinstance(value, str) else len(next(iter(value.values())))
        for part in parts
        for value in part.values()
    )


def _chat_part(role: str, part: ContentPart, path: str, rate: int) -> dict[str, Any]:
    if part.type in ("input_text", "output_text", "text"):
        return {"type": "text", "text": _given(part.text, f"{path}.text")}
    if part.type == "output_audio":
        return {"type": "text", "text": _given(part.transcript, f"{path}.transcript")}
    if role != "user":
        raise EventError(
            Code.INVALID_EVENT, f"A message of the {role} has text only", f"{path}.type"
        )
    if part.type == "input_image":
        return {
            "type": "image_url",
            "image_url": {"url": _given(part.image_url, f"{path}.image_url")},
        }
    audio = _given(part.audio, f"{path}.audio")
    return _sound_part(decode_pcm16(audio, f"{path}.audio"), rate)


def _shown(role: str, part: dict[str, Any]) -> dict[str, Any]:
    """A part as the client is told of it; what it sent itself is not sent back."""
    if part["type"] == "text":
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": kind, "text": part["text"]}
    return {"type": "input_image" if part["type"] == "image_url" else "input_audio"}


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise EventError(Code.INVALID_EVENT, f"Missing required field: {param}", param)
    return value


def _sound_part(pcm: bytes, rate: int) -> dict[str, Any]:
    """The samples as a WAV file, which goes through the checks of any client's file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(_BYTES_PER_SAMPLE)
        writer.setframerate(rate)
        writer.writeframes(pcm)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
