# SPDX-License-Identifier: Apache-2.0
"""What the loaded model offers, so that the page shows only what works."""

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import BaseModel, Field

import vllm_omni
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.generation.service import Generation
from vllm_omni.entrypoints.openai.protocol.images import MAX_IMAGES, MAX_PARTIAL_IMAGES
from vllm_omni.entrypoints.openai.protocol.speech import SpeechFormat
from vllm_omni.entrypoints.openai.speech.service import Speech
from vllm_omni.media.audio_encode import AUDIO_FORMATS
from vllm_omni.media.image_encode import IMAGE_FORMATS

Task = Literal["chat", "speech", "images", "videos", "sounds"]

SOUND_FORMATS: tuple[str, ...] = get_args(SpeechFormat)


class ChatOffer(BaseModel):
    """Of `/v1/chat/completions`."""

    modalities: list[str] = Field(description="What it answers with.")
    inputs: dict[str, int] = Field(
        description="Media that a conversation may bring beside text -> most of each."
    )
    voices: list[str] = Field(description="The default one first.")
    audio_formats: list[str]


class SpeakingOffer(BaseModel):
    """Of `/v1/audio/speech`; its voices are at `/v1/audio/voices`, for they come and go."""

    sample_rate: int = Field(description="Hz.")
    languages: list[str]
    tasks: list[str]
    instructions: bool = Field(description="It reads how to say something.")
    max_references: int = Field(description="Most recordings of a voice; 0 if it cannot clone.")
    needs_reference: bool = Field(description="It has no voice of its own.")
    needs_transcript: bool = Field(description="A recording needs what is said in it.")
    formats: list[str]


class PaintingOffer(BaseModel):
    """Of `/v1/images/generations` and `/v1/images/edits`."""

    from_text: bool
    from_image: bool
    max_pixels: int
    max_images: int = Field(description="Most pictures of one request.")
    max_previews: int = Field(description="Most previews of one request.")
    formats: list[str]


class FilmingOffer(BaseModel):
    """Of `/v1/videos`."""

    from_text: bool
    from_image: bool
    from_video: bool
    max_pixels: int = Field(description="Of a frame.")


class ComposingOffer(BaseModel):
    """Of `/v1/audio/generate`."""

    formats: list[str]


class Offer(BaseModel):
    """Answer of `/playground/offer`; what the model does not do is null."""

    version: str = vllm_omni.__version__
    models: list[str] = Field(description="The model's names, any of which `model` may be.")
    stages: list[str] = Field(description="The pipeline's stages, in order.")
    tasks: list[Task]
    chat: ChatOffer | None = None
    speech: SpeakingOffer | None = None
    images: PaintingOffer | None = None
    videos: FilmingOffer | None = None
    sounds: ComposingOffer | None = None


def chat_offer(engine: AsyncOmni, models: Sequence[str]) -> Offer:
    """Of a pipeline with a language model at its entry."""
    processor = engine.renderer.mm_processor
    limits = {} if processor is None else processor.info.allowed_mm_limits
    modalities = list(engine.pipeline.output_modalities)
    chat = ChatOffer(
        modalities=modalities,
        inputs={medium: most for medium, most in limits.items() if most},
        voices=list(engine.voices) if "audio" in modalities else [],
        audio_formats=list(AUDIO_FORMATS) if "audio" in modalities else [],
    )
    return Offer(models=list(models), stages=_stages(engine), tasks=["chat"], chat=chat)


def speech_offer(speech: Speech, models: Sequence[str]) -> Offer:
    """Of a text-to-speech pipeline."""
    offer = speech.offer
    speaking = SpeakingOffer(
        sample_rate=offer.sample_rate,
        languages=list(offer.languages),
        tasks=list(offer.tasks),
        instructions=offer.instructions,
        max_references=offer.max_references,
        needs_reference=offer.needs_reference,
        needs_transcript=offer.needs_transcript,
        formats=list(SOUND_FORMATS),
    )
    stages = _stages(speech.engine)
    return Offer(models=list(models), stages=stages, tasks=["speech"], speech=speaking)


def generation_offer(generation: Generation, models: Sequence[str]) -> Offer:
    """Of a diffusion pipeline. May import pipelines of diffusers: not for the event loop."""
    stages = _stages(generation.engine)
    match generation.modality:
        case "image":
            images = PaintingOffer(
                from_text=generation.takes(()),
                from_image=generation.takes(("image",)),
                max_pixels=generation.max_pixels,
                max_images=MAX_IMAGES,
                max_previews=MAX_PARTIAL_IMAGES,
                formats=list(IMAGE_FORMATS),
            )
            return Offer(models=list(models), stages=stages, tasks=["images"], images=images)
        case "video":
            videos = FilmingOffer(
                from_text=generation.takes(()),
                from_image=generation.takes(("image",)),
                from_video=generation.takes(("video",)),
                max_pixels=generation.max_pixels,
            )
            return Offer(models=list(models), stages=stages, tasks=["videos"], videos=videos)
    sounds = ComposingOffer(formats=list(SOUND_FORMATS))
    return Offer(models=list(models), stages=stages, tasks=["sounds"], sounds=sounds)


def _stages(engine: AsyncOmni) -> list[str]:
    return [stage.name for stage in engine.pipeline.stages]
