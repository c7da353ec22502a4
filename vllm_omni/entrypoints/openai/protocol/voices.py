# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/audio/voices`."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from vllm_omni.entrypoints.openai.protocol.content import check_text
from vllm_omni.entrypoints.openai.protocol.speech import (
    MAX_EMBEDDING,
    ReferenceText,
    empty_or_speakable,
    without_controls,
)
from vllm_omni.entrypoints.openai.protocol.unknown import KnownFields

MAX_CONSENT = 1000
MAX_DESCRIPTION = 2000


class VoiceUpload(KnownFields):
    """Fields of an upload beside its recording."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: str = Field(max_length=256, description="What to call it in `voice`.")
    consent: Annotated[
        str,
        StringConstraints(min_length=1, max_length=MAX_CONSENT, strip_whitespace=True),
        AfterValidator(without_controls),
    ] = Field(description="Who says, or where it says, that this voice may be used.")
    ref_text: Annotated[ReferenceText, AfterValidator(empty_or_speakable)] | None = Field(
        default=None, description="What is said in the recording."
    )
    speaker_description: (
        Annotated[
            str, StringConstraints(max_length=MAX_DESCRIPTION), AfterValidator(without_controls)
        ]
        | None
    ) = Field(default=None, description="The speaker, in words.")
    speaker_embedding: (
        Annotated[list[float], Field(min_length=1, max_length=MAX_EMBEDDING)] | None
    ) = Field(default=None, description="In place of a recording.")

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_text(data)
        return data


class UploadedVoice(BaseModel):
    """What is told of an uploaded voice."""

    name: str
    consent: str
    created_at: int
    seconds: float | None = Field(description="Of the recording; null if it is an embedding.")
    sample_rate: int | None = Field(description="Hz, of the recording.")
    ref_text: str | None = None
    speaker_description: str | None = None


class VoiceList(BaseModel):
    """Answer of `GET /v1/audio/voices`."""

    voices: list[str] = Field(description="All that `voice` may name here.")
    uploaded_voices: list[UploadedVoice]
    languages: list[str]
    tasks: list[str]


class VoiceMade(BaseModel):
    """Answer of `POST /v1/audio/voices`."""

    success: bool = True
    voice: UploadedVoice
    note: str | None = Field(default=None, description="What it can be used with, if not alone.")


class VoiceDeleted(BaseModel):
    """Answer of `DELETE /v1/audio/voices/{name}`."""

    success: bool = True
    name: str
    deleted: bool = True
