# SPDX-License-Identifier: Apache-2.0
"""Bodies of `/v1/chat/completions` at a model that only paints."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from vllm_omni.entrypoints.openai.protocol.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.protocol.diffusion import MAX_PROMPT, at_fault
from vllm_omni.entrypoints.openai.protocol.images import (
    ImageGenerationRequest,
    ImageRequest,
)

MAX_MESSAGES = 1000
CONVERSATION = frozenset(OmniChatCompletionRequest.model_fields) | {"metadata", "store"}
"""Fields of requests to a model that talks. As in vLLM what has no effect is no error."""
_IN_THE_ANSWER: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "tool_choice": (None, "none", "auto"),
    "audio": (None,),
}
"""Fields that ask for something in the answer -> values with which they do not."""
MAX_PARTS = 64


class ImageUrl(BaseModel):
    """Where a picture is."""

    url: Annotated[str, StringConstraints(min_length=1)]


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: Annotated[str, StringConstraints(max_length=MAX_PROMPT)]


class ImagePart(BaseModel):
    """A part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class UserMessage(BaseModel):
    """What is painted."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user"]
    content: (
        Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
        | Annotated[list[Part], Field(min_length=1, max_length=MAX_PARTS)]
    )

    def text(self) -> str:
        """Its words."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))

    def image_urls(self) -> list[str]:
        """Its pictures."""
        if isinstance(self.content, str):
            return []
        return [part.image_url.url for part in self.content if isinstance(part, ImagePart)]


class OtherMessage(BaseModel):
    """What came before; a model that paints has no memory of it."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "assistant", "tool"]
    content: Any = None


Message = Annotated[UserMessage | OtherMessage, Field(discriminator="role")]


class DiffusionChatRequest(ImageRequest):
    """OpenAI's conversation; the last thing that its user said is painted."""

    prompt: None = Field(default=None, exclude=True)  # type: ignore[assignment]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[str], Field(max_length=8)] | None = Field(
        default=None, description="`image`, if it is given."
    )
    sampling_params_list: Annotated[list[Any], Field(max_length=64)] | None = Field(
        default=None, description="Of models of several stages; here only empty ones are taken."
    )
    sigmas: Annotated[list[float], Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="Noise levels, instead of a number of steps."
    )

    @model_validator(mode="after")
    def _refuse_what_the_answer_would_lack(self) -> "DiffusionChatRequest":
        extra = self.model_extra or {}
        for name, harmless in _IN_THE_ANSWER.items():
            if name in extra and extra[name] not in harmless:
                raise at_fault(name, "this model makes pictures, so there is none in its answer")
        return self

    def unknown(self) -> dict[str, Any]:
        """What was given and is a field of no conversation."""
        return {n: value for n, value in super().unknown().items() if n not in CONVERSATION}

    def ignored(self) -> list[str]:
        """Fields of conversations that were given and have no effect on pictures."""
        return sorted(set(super().unknown()) & CONVERSATION)

    @model_validator(mode="after")
    def _refuse_what_it_would_ignore(self) -> "DiffusionChatRequest":
        if self.modalities and "image" not in self.modalities:
            raise at_fault("modalities", "this model makes pictures (image) and nothing else")
        if any(self.sampling_params_list or ()):
            raise at_fault("sampling_params_list", "give its fields in the request itself")
        return self

    def said(self) -> UserMessage:
        """What is painted.

        Raises:
            OmniClientError: The user said nothing.
        """
        for message in reversed(self.messages):
            if isinstance(message, UserMessage):
                if not message.text():
                    raise at_fault("messages", "the last one of the user has no text")
                return message
        raise at_fault("messages", "none is the user's")

    def as_generation(self) -> ImageGenerationRequest:
        """The same as a request for pictures."""
        shared = self.model_dump(
            include=set(ImageGenerationRequest.model_fields), exclude_unset=True
        )
        shared["prompt"] = self.said().text()
        shared |= {"stream": False, "partial_images": 0, **self.unknown()}
        if self.sigmas is not None:
            shared["sigmas"] = self.sigmas
        return ImageGenerationRequest.model_validate(shared)
