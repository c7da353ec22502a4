# SPDX-License-Identifier: Apache-2.0
"""Bodies of the speech routes: OpenAI's fields, and what vLLM-Omni's users have beside them.

What depends on the checkpoint (its voices, languages, tasks) is checked in `speech/asking.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from vllm_omni.config.sampling import LEAST_PENALTY
from vllm_omni.entrypoints.openai.protocol.content import check_text
from vllm_omni.entrypoints.openai.protocol.diffusion import Name, Seed, at_fault
from vllm_omni.entrypoints.openai.protocol.unknown import KnownFields, check_known
from vllm_omni.media.tempo import MAX_TEMPO, MIN_TEMPO
from vllm_omni.speech.text import first_control, is_speakable

SpeechFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm"]

MAX_BATCH_ITEMS = 64
MAX_REFERENCES = 32
"""Before it is known how many the checkpoint takes."""
MAX_EMBEDDING = 8192
MAX_EXTRA_PARAMS = 64
MAX_NEW_TOKENS = 1 << 20
MIN_RATE, MAX_RATE = 8000, 96_000
"""Sample rates that can be asked for, Hz."""
MAX_REFERENCE_TEXT = 4096
"""Characters of `ref_text`."""
MAX_SALT = 1024
"""Characters of `cache_salt`."""
MAX_ANY_TEXT = 1 << 20
"""Characters of a text before it is looked at; what the server takes is less."""

VOICE_KEYS = ("id", "name")
"""Of `voice` as an object, one of which names it."""


def _voice(value: Any) -> Any:
    """OpenAI's `voice` may be `{"id": ...}`."""
    if not isinstance(value, Mapping):
        return value
    check_known(value, VOICE_KEYS, "voice")
    given = [value[key] for key in VOICE_KEYS if value.get(key) is not None]
    if len(given) == 1:
        return given[0]
    raise PydanticCustomError("voice", "should be a name, or an object with its `id` alone")


def without_controls(text: str) -> str:
    """For validators: a text as it is, if it has no control characters but line breaks and tabs."""
    if (position := first_control(text)) is not None:
        raise PydanticCustomError(
            "control_character",
            "has the control character U+{code} at position {position}",
            {"code": f"{ord(text[position]):04X}", "position": position},
        )
    return text


def _speakable(text: str) -> str:
    if not is_speakable(text):
        raise PydanticCustomError(
            "nothing_to_say", "should have something to say: a letter or a digit at least"
        )
    return text


def empty_or_speakable(text: str) -> str:
    """For validators: a text that has something to say, or is none."""
    return _speakable(text) if text else text


Text = Annotated[str, StringConstraints(max_length=MAX_ANY_TEXT), AfterValidator(without_controls)]
Spoken = Annotated[Text, AfterValidator(_speakable)]
ReferenceText = Annotated[
    str, StringConstraints(max_length=MAX_REFERENCE_TEXT), AfterValidator(without_controls)
]
Source = Annotated[str, StringConstraints(min_length=1)]


def _one_or_many(each: Any) -> PlainValidator:
    """A value of that type, or a list of some; a union would not say what is wrong with either."""
    one: TypeAdapter[str] = TypeAdapter(each)

    def validated(value: Any) -> str | list[str]:
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_REFERENCES:
            raise PydanticCustomError(
                "too_long", "should be {most} at most", {"most": MAX_REFERENCES}
            )
        try:
            made = [one.validate_python(value) for value in values]
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise PydanticCustomError("one_or_many", "{reason}", {"reason": reason}) from None
        return made if isinstance(value, list) else made[0]

    return PlainValidator(validated, json_schema_input_type=str | list[str])


Sources = Annotated[str | list[str], _one_or_many(Source)]
ReferenceTexts = Annotated[str | list[str], _one_or_many(ReferenceText)]


class SpeechOptions(KnownFields):
    """How something is to be spoken. Unset: the checkpoint's default."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: Name | None = Field(default=None, description="The model's served name.")
    voice: Annotated[Name | None, BeforeValidator(_voice)] = Field(
        default=None, description="A speaker of the checkpoint, or an uploaded voice."
    )
    instructions: Text | None = Field(default=None, description="How to say it, in words.")
    response_format: SpeechFormat | None = Field(
        default=None, description="The file's format; wav if unset."
    )
    sample_rate: int | None = Field(
        default=None, ge=MIN_RATE, le=MAX_RATE, description="Hz; the model's own if unset."
    )
    speed: float | None = Field(
        default=None, ge=MIN_TEMPO, le=MAX_TEMPO, description="How fast, at the same pitch."
    )
    task_type: Name | None = Field(default=None, description="Base, CustomVoice or VoiceDesign.")
    language: Name | None = Field(default=None, description="Of the text; Auto to find out.")
    ref_audio: Sources | None = Field(
        default=None,
        description="Recordings of the voice: http(s) or data URL, base64, or an uploaded voice.",
    )
    ref_audio_2: Source | None = Field(default=None, description="The second speaker's.")
    ref_text: ReferenceTexts | None = Field(
        default=None, description="What is said in the recordings."
    )
    x_vector_only_mode: bool | None = Field(
        default=None, description="Take the speaker alone from a recording, not what is said."
    )
    speaker_embedding: (
        Annotated[list[float], Field(min_length=1, max_length=MAX_EMBEDDING)] | None
    ) = Field(default=None, description="In place of a recording.")
    ref_audio_codes: list[Any] | None = Field(
        default=None,
        max_length=1 << 16,
        description="An encoded recording, of models that take it.",
    )
    ambient_sound: Text | None = Field(default=None, description="Of models that read it.")
    duration_seconds: float | None = Field(
        default=None, gt=0, le=3600, description="Length, of models that read it."
    )
    max_new_tokens: int | None = Field(
        default=None, ge=1, le=MAX_NEW_TOKENS, description="Most tokens, the end included."
    )
    seed: Seed | None = Field(default=None, description="The same seed, the same sound.")
    temperature: float | None = Field(default=None, ge=0, le=10, description="Of the first stage.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Of the first stage.")
    top_k: int | None = Field(default=None, ge=-1, le=1 << 20, description="Of the first stage.")
    repetition_penalty: float | None = Field(
        default=None, ge=LEAST_PENALTY, le=10, description="Of the first stage."
    )
    initial_codec_chunk_frames: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Codec frames of the first piece of sound; a long one comes later.",
    )
    non_streaming_mode: bool | None = Field(
        default=None,
        description="The whole text stands in the prompt, or comes one token per frame (A-50).",
    )
    word_timestamps: bool | None = Field(default=None, description="Of models that have them.")
    extra_params: dict[str, Any] | None = Field(
        default=None,
        max_length=MAX_EXTRA_PARAMS,
        description="Further options, by the family's own names.",
    )
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT)] | None = Field(
        default=None,
        description="Computed beginnings of prompts are shared with requests of this salt alone.",
    )
    user: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_text(data)
        return data

    def over(self, defaults: "SpeechOptions") -> dict[str, Any]:
        """Fields of both: those of `defaults` where these are unset."""
        common = set(SpeechOptions.model_fields)
        below = defaults.model_dump(include=common, exclude_none=True)
        return below | self.model_dump(exclude_none=True)

    @property
    def format(self) -> str:
        """The format to make."""
        return self.response_format or "wav"

    @property
    def tempo(self) -> float:
        """How many times as fast."""
        return 1.0 if self.speed is None else self.speed


class SpeechBody(SpeechOptions):
    """Body of `/v1/audio/speech`."""

    input: Spoken = Field(description="What to say.")
    stream_format: Literal["audio", "sse"] = Field(
        default="audio", description="The file itself, or events with pieces of it."
    )
    stream: bool | None = Field(
        default=None, description="False: answer when all is made. Else as it is made."
    )

    return_stage_metrics: bool = Field(
        default=False,
        description="Tell the timing of each stage: in a header, or in the last event's `metrics`.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream is False and self.stream_format == "sse":
            raise at_fault("stream", "events are a stream: leave it out, or send true")
        if self.return_stage_metrics and self.stream_format == "audio" and self.stream is not False:
            raise at_fault(
                "return_stage_metrics",
                "a file that is sent as it is made has no place for it: set `stream_format` to "
                "sse, or `stream` to false",
            )
        return self


class BatchItem(SpeechOptions):
    """One text of a batch; checked by itself, so that a wrong one spoils no other."""

    input: Spoken = Field(description="What to say.")


class BatchBody(SpeechOptions):
    """Body of `/v1/audio/speech/batch`: what holds for all items, and the items."""

    items: list[dict[str, Any]] = Field(
        min_length=1,
        max_length=MAX_BATCH_ITEMS,
        description="`input` of each, and what is different from the fields beside `items`.",
    )


class SpeechUsage(BaseModel):
    """OpenAI's usage."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0


class BatchResult(BaseModel):
    """What became of one text."""

    index: int
    status: Literal["success", "error"]
    audio_data: str | None = None
    media_type: str | None = None
    error: dict[str, Any] | None = None
    usage: SpeechUsage | None = None


class BatchResponse(BaseModel):
    """Answer of `/v1/audio/speech/batch`."""

    results: list[BatchResult]
    total: int
    succeeded: int
    failed: int
