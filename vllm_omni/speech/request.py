# SPDX-License-Identifier: Apache-2.0
"""What a caller wants to be spoken: the prompt of a text-to-speech pipeline.

`Omni.generate` and `AsyncOmni.generate` take a `SpeechRequest` (or plain text) where the pipeline's
first stage is a codec language model; `/v1/audio/speech` makes one out of its body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_SAMPLE_RATE = 384_000
"""Of a recording, Hz."""
SILENT = 1e-4
"""A recording that nowhere reaches this is silent."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A recording whose voice is to be spoken in.

    Attributes:
        samples: Floating point [n], mono, in [-1, 1]; not silent.
        sample_rate: Hz, up to `MAX_SAMPLE_RATE`.
        text: What is said in it, for models that read it; None if that is not known.
    """

    samples: np.ndarray
    sample_rate: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpeechRequest:
    """One text to speak. What a checkpoint does not offer is refused, never ignored.

    Attributes:
        text: What to say.
        voice: A speaker of the checkpoint, compared without case; None for its default.
        task: How the voice is chosen (`CustomVoice`, `VoiceDesign`, `Base`), for families that have
            such; None for what the checkpoint was made for.
        language: A language of the checkpoint, compared without case, or None to leave it to it.
        instructions: How to say it, in words.
        references: Recordings of the voice (several for a dialogue); empty for none.
        speaker_embedding: Numbers [d], in place of a recording.
        x_vector_only: Of a recording take the speaker embedding alone, not what was said in it.
        non_streaming: The whole text stands in the prompt (True), or follows one token per frame
            (False); None for what the task does (row A-50). It does not concern how sound is sent.
        initial_frames: Codec frames of the first piece of sound (row I-17); the deployment's number
            if None. At most the number that later pieces have.
        extra: Further options, by the family's own names.
        cache_salt: What was computed of the beginning of a prompt (a voice, a recording, ...)
            serves others that begin so; only those with the same salt, if there is one.
    """

    text: str
    voice: str | None = None
    task: str | None = None
    language: str | None = None
    instructions: str | None = None
    references: tuple[Reference, ...] = ()
    speaker_embedding: np.ndarray | None = None
    x_vector_only: bool = False
    non_streaming: bool | None = None
    initial_frames: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
