# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/chat/completions`.

vLLM's own models, extended: a request for text is vLLM's request. Sound comes back where OpenAI
puts it (`message.audio`, `delta.audio`); `modality`, `audio_metadata` and `metrics` are extras of
vLLM-Omni's clients.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
)
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.sampling_params import SamplingParams

from vllm_omni.entrypoints.openai.protocol.content import check_parts, check_text, check_truncation

DEFAULT_AUDIO_FORMAT = "wav"


class VoiceId(BaseModel):
    """OpenAI's object form of a voice."""

    id: str


class ChatAudioParam(BaseModel):
    """OpenAI's `audio` parameter: how the sound should be."""

    model_config = ConfigDict(extra="allow")

    voice: str | VoiceId | None = Field(
        default=None, description="Speaker, compared without case; the model's default if unset."
    )
    format: str = Field(
        default=DEFAULT_AUDIO_FORMAT,
        description="wav, mp3, flac, opus, aac or pcm16. All chunks of a stream make one file.",
    )


class OmniChatCompletionRequest(ChatCompletionRequest):
    """OpenAI's request, vLLM's extras, and what multi-stage pipelines take beside."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    messages: Annotated[list[ChatCompletionMessageParam], Field(min_length=1)]
    modalities: list[str] | None = Field(
        default=None,
        description="What to answer with: text, audio, or both. Unset: text, as at OpenAI; "
        "audio as well if `audio` is given.",
    )
    audio: ChatAudioParam | None = Field(default=None, description="How the sound should be.")
    voice: str | None = Field(default=None, description="Same as `audio.voice`, which wins.")
    speaker: str | None = Field(default=None, description="Same as `voice`, which wins.")
    language: str | None = Field(default=None, description="Language of the speech.")
    instructions: str | None = Field(default=None, description="How to speak.")
    additional_information: dict[str, Any] | None = Field(
        default=None, description="Passed to the pipeline as it is."
    )
    sampling_params_list: list[dict[str, Any] | None] | None = Field(
        default=None,
        description="vLLM sampling parameters per stage, in the order of the stages; they are laid "
        "over the stage's defaults. null or {} leaves a stage as it is.",
    )
    return_stage_metrics: bool = Field(
        default=False, description="Answer with the timing of each stage in `metrics`."
    )

    def to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any]
    ) -> SamplingParams:
        """As vLLM's, with every default of the deployment and not only those of OpenAI's fields."""
        params = super().to_sampling_params(max_tokens, default_sampling_params)
        settled = {*self._DEFAULT_SAMPLING_PARAMS, "max_tokens", "stop_token_ids", "output_kind"}
        for name, value in default_sampling_params.items():
            if name not in settled and name not in self.model_fields_set:
                setattr(params, name, value)
        return params

    @model_validator(mode="before")
    @classmethod
    def _check_content(cls, data: Any) -> Any:
        if isinstance(data, dict):
            check_text(data)
            check_parts(data.get("messages"))
            check_truncation(data)
        return data


class OmniBatchChatCompletionRequest(BatchChatCompletionRequest):
    """vLLM's batch of conversations, which are answered with text and not streamed."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_it_would_ignore(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_truncation(data)
        for name in (*_BEYOND_TEXT, "stream"):
            value = data.get(name)
            if not value or (name == "modalities" and value == ["text"]):
                continue
            raise VLLMValidationError(
                f"`{name}` is not supported for batches of conversations; send each to "
                "/v1/chat/completions.",
                parameter=name,
            )
        return data


_BEYOND_TEXT = (
    "modalities",
    "audio",
    "voice",
    "speaker",
    "language",
    "instructions",
    "additional_information",
    "sampling_params_list",
    "return_stage_metrics",
)
"""Fields of `OmniChatCompletionRequest` that are not vLLM's."""


class AudioMetadata(BaseModel):
    """What the bytes in `audio.data` are."""

    format: str
    sample_rate_hz: int
    channels: int = 1
    frame_count: int


class OmniChatCompletionResponseChoice(ChatCompletionResponseChoice):
    """A choice, and which modalities it holds."""

    modality: str = "text"
    audio_metadata: AudioMetadata | None = None


class OmniChatCompletionResponse(ChatCompletionResponse):
    """vLLM's response with our choices and the stages' timing."""

    choices: list[OmniChatCompletionResponseChoice]  # type: ignore[assignment]
    metrics: dict[str, Any] | None = None  # type: ignore[assignment]
