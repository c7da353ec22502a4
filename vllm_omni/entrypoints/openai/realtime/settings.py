# SPDX-License-Identifier: Apache-2.0
"""What a session has chosen, and the chat request that a response is."""

from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.entrypoints.openai.protocol.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.protocol.realtime import (
    OUTPUT_RATE,
    Modality,
    ResponseOptions,
    SessionOptions,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of a session; those of one response are laid over a copy.

    Attributes:
        modalities: OpenAI's: `audio` includes its transcript.
        input_rate: Hz of the client's sound.
        max_tokens: Most tokens of text; None for as many as there is room for.
    """

    modalities: tuple[Modality, ...] = ("audio",)
    instructions: str | None = None
    voice: str | None = None
    input_rate: int = OUTPUT_RATE
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    sampling: list[dict[str, Any] | None] | None = None

    @property
    def speaks(self) -> bool:
        """Whether a response is sound."""
        return "audio" in self.modalities

    def updated(self, options: ResponseOptions) -> "Settings":
        """These with the fields that `options` has."""
        audio = options.audio
        output = audio.output if audio else None
        changes: dict[str, Any] = {
            "modalities": options.output_modalities or options.modalities,
            "instructions": options.instructions,
            "voice": (output.voice if output else None) or options.voice,
            "temperature": options.temperature,
            "seed": options.seed,
            "sampling": options.sampling_params_list,
        }
        if isinstance(options, SessionOptions) and audio and audio.input and audio.input.format:
            changes["input_rate"] = audio.input.format.rate
        made = replace(self, **{k: v for k, v in changes.items() if v is not None})
        limit = options.max_output_tokens or options.max_response_output_tokens
        if limit is not None:
            made = replace(made, max_tokens=None if limit == "inf" else limit)
        return made

    def chat_request(
        self, model: str, messages: list[dict[str, Any]], request_id: str
    ) -> OmniChatCompletionRequest:
        """The request of one response.

        Raises:
            pydantic.ValidationError, VLLMValidationError: A field is invalid.
        """
        if self.instructions:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "request_id": request_id,
            "stream": True,
            "stream_options": {"include_usage": True},
            "modalities": ["audio"] if self.speaks else ["text"],
        }
        optional = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "sampling_params_list": self.sampling,
        }
        if self.speaks:
            optional["audio"] = {"format": "pcm16", "voice": self.voice}
        body |= {name: value for name, value in optional.items() if value is not None}
        return OmniChatCompletionRequest.model_validate(body)

    def described(self, session_id: str, model: str | None) -> dict[str, Any]:
        """The session as the client is told of it."""
        pcm = {"type": "audio/pcm"}
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": session_id,
            "model": model,
            "instructions": self.instructions or "",
            "output_modalities": list(self.modalities),
            "max_output_tokens": self.max_tokens or "inf",
            "audio": {
                "input": {"format": pcm | {"rate": self.input_rate}, "turn_detection": None},
                "output": {"format": pcm | {"rate": OUTPUT_RATE}, "voice": self.voice},
            },
        }
