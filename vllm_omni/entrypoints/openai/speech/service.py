# SPDX-License-Identifier: Apache-2.0
"""A text-to-speech pipeline behind HTTP."""

import argparse
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from vllm.entrypoints.openai.models.protocol import BaseModelPath

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.engine_outputs import told
from vllm_omni.entrypoints.openai.generation.service import fetch_settings, served_name
from vllm_omni.entrypoints.openai.speech.asking import Asked, Asking, in_fields_of_speech
from vllm_omni.entrypoints.openai.speech.limits import SpeechLimits, voice_folder
from vllm_omni.entrypoints.openai.speech.recordings import Recordings
from vllm_omni.entrypoints.openai.speech.voices import VoiceStore
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.speech.family import SpeechOffer


@dataclass(frozen=True, slots=True)
class Speech:
    """A text-to-speech pipeline behind HTTP.

    Attributes:
        engine: Runs it.
        offer: What the checkpoint can do.
        models: Its names.
        limits: What a client may ask for.
        recordings: Reads recordings of voices.
        voices: Uploaded ones.
    """

    engine: AsyncOmni
    offer: SpeechOffer
    models: Sequence[BaseModelPath]
    limits: SpeechLimits
    recordings: Recordings
    voices: VoiceStore

    @classmethod
    def of(
        cls,
        engine: AsyncOmni,
        offer: SpeechOffer,
        models: Sequence[BaseModelPath],
        args: argparse.Namespace,
    ) -> "Speech":
        """From the flags of `vllm serve --omni`."""
        recordings = Recordings(fetch_settings(args), offer.reference_seconds)
        voices = VoiceStore(voice_folder(args))
        return cls(engine, offer, models, SpeechLimits.of(args), recordings, voices)

    def asking(self) -> Asking:
        """What reads the bodies of a new request or session."""
        return Asking(self.offer, self.limits, self.recordings, self.voices)

    def served_name(self, name: str | None) -> str:
        """The model's name as the client gave it, or its first one.

        Raises:
            OmniClientError: It is another model's.
        """
        return served_name(self.models, name)

    def outputs(self, asked: Asked, request_id: str) -> AsyncGenerator[OmniRequestOutput, None]:
        """Speak.

        Args:
            asked: What.
            request_id: For the log.

        Raises:
            OmniClientError: Names the field at fault.
            StageUnavailableError: The process that worked on it has ended.
        """
        others: list[Any] = [None] * (len(self.engine.pipeline.stages) - 1)
        outputs = self.engine.generate(
            asked.request,
            sampling_params_list=[dict(asked.sampling), *others] if asked.sampling else None,
            output_modalities=["audio"],
            request_id=request_id,
        )
        return told(outputs, in_fields_of_speech)


def speech_of(request: Request) -> Speech:
    """That of the application which a request came to."""
    speech: Speech = request.app.state.omni_speech
    return speech
