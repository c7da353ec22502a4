# SPDX-License-Identifier: Apache-2.0
"""`/v1/audio/transcriptions` and `/translations`: vLLM's, over sounds that were decoded here.

vLLM hands an upload to libsndfile and then to FFmpeg as it is, which takes a playlist for a sound
and opens the files and addresses that it names.
"""

import asyncio
import io
from typing import Any

import soundfile
from fastapi import Request
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation
from vllm.multimodal.media import AudioMediaIO

from vllm_omni.entrypoints.openai.media_checks import media_limits
from vllm_omni.entrypoints.openai.media_loading import load_sound

PARAM = "file"


class OmniServingTranscription(OpenAIServingTranscription):
    """vLLM's handler of transcriptions."""

    async def create_transcription(
        self,
        audio_data: bytes,
        request: TranscriptionRequest,
        raw_request: Request | None = None,
    ) -> Any:
        """See `OpenAIServingTranscription`.

        Raises:
            OmniClientError: The upload is no sound.
        """
        wav = await asyncio.to_thread(as_plain_wav, audio_data)
        return await super().create_transcription(wav, request, raw_request)


class OmniServingTranslation(OpenAIServingTranslation):
    """vLLM's handler of translations."""

    async def create_translation(
        self,
        audio_data: bytes,
        request: TranslationRequest,
        raw_request: Request | None = None,
    ) -> Any:
        """See `OpenAIServingTranslation`.

        Raises:
            OmniClientError: The upload is no sound.
        """
        wav = await asyncio.to_thread(as_plain_wav, audio_data)
        return await super().create_translation(wav, request, raw_request)


def as_plain_wav(data: bytes) -> bytes:
    """An upload's sound as the models hear it, in the plainest of files.

    Raises:
        OmniClientError: It passes a limit, or is no sound.
    """
    samples, rate = load_sound(AudioMediaIO(), data, media_limits(), param=PARAM)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()
