# SPDX-License-Identifier: Apache-2.0
"""What a client of `WS /v1/realtime` may say (API.md section 5).

OpenAI's events, both the present shape (`session.audio.output.voice`) and the earlier, flat one
(`session.voice`), and vLLM's `session.update` with the model beside the session. What the server
says is in `openai.types.realtime`, so that the official client understands it by construction.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

OUTPUT_RATE = 24_000
"""Hz of the sound that is sent; the one rate of OpenAI's `audio/pcm`."""
InputRate = Literal[16_000, 24_000]
"""Hz of the sound that is received; vLLM's realtime clients send 16 kHz."""
Modality = Literal["text", "audio"]
ItemId = Annotated[str, Field(min_length=1, max_length=64)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class InputFormat(_Part):
    """How the client's sound is coded."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: InputRate = OUTPUT_RATE


class OutputFormat(_Part):
    """How the server's sound is coded."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = OUTPUT_RATE


class AudioInput(_Part):
    """`audio.input` of a session."""

    format: InputFormat | None = None
    turn_detection: Any = None
    transcription: Any = None

    @field_validator("turn_detection", "transcription")
    @classmethod
    def _absent(cls, value: Any) -> None:
        return _must_be_null(value)


class AudioOutput(_Part):
    """`audio.output` of a session or a response."""

    format: OutputFormat | None = None
    voice: str | None = None


class AudioOptions(_Part):
    """`audio` of a session or a response."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class ResponseOptions(_Part):
    """What one response, or all of a session, should be like. Unset fields stay as they are."""

    instructions: str | None = None
    output_modalities: list[Modality] | None = Field(default=None, min_length=1, max_length=2)
    modalities: list[Modality] | None = Field(default=None, min_length=1, max_length=2)
    audio: AudioOptions | None = None
    voice: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = None
    max_response_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = None
    sampling_params_list: list[dict[str, Any] | None] | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)


class SessionOptions(ResponseOptions):
    """`session` of `session.update`."""

    model: str | None = None
    input_audio_format: Literal["pcm16"] | None = None
    output_audio_format: Literal["pcm16"] | None = None
    turn_detection: Any = None

    @field_validator("turn_detection")
    @classmethod
    def _absent(cls, value: Any) -> None:
        return _must_be_null(value)


class _Event(_Part):
    event_id: str | None = Field(default=None, max_length=512)


class SessionUpdate(_Event):
    """`session.update`."""

    model: str | None = None
    session: SessionOptions = SessionOptions()


class AudioAppend(_Event):
    """`input_audio_buffer.append`."""

    audio: str


class AudioCommit(_Event):
    """`input_audio_buffer.commit`."""


class AudioClear(_Event):
    """`input_audio_buffer.clear`."""


class ContentPart(_Part):
    """A part of an item that the client makes."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "text", "output_audio"]
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None


class Item(_Part):
    """A message that the client puts into the conversation."""

    id: ItemId | None = None
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system"]
    content: list[ContentPart] = Field(min_length=1, max_length=64)


class ItemCreate(_Event):
    """`conversation.item.create`."""

    item: Item
    previous_item_id: str | None = None


class ItemDelete(_Event):
    """`conversation.item.delete`."""

    item_id: str


class ResponseCreate(_Event):
    """`response.create`."""

    response: ResponseOptions = ResponseOptions()


class ResponseCancel(_Event):
    """`response.cancel`."""

    response_id: str | None = None


ClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ItemCreate
    | ItemDelete
    | ResponseCreate
    | ResponseCancel
)

CLIENT_EVENTS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.delete": ItemDelete,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


class SessionEvent(BaseModel):
    """`session.created` and `session.updated`: OpenAI's type knows no sound of 16 kHz."""

    event_id: str
    type: Literal["session.created", "session.updated"]
    session: dict[str, Any]


def _must_be_null(value: Any) -> None:
    if value is not None:
        raise ValueError("is not supported yet: send null")
