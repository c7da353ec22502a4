# SPDX-License-Identifier: Apache-2.0
"""What a family of text-to-speech models declares: what it offers, and how its prompts are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.speech.request import SpeechRequest

REFERENCE = "reference"
"""Medium of recordings, and modality of what is made of them."""
NOTHING = -1
"""In `SpeechPrompt`: no token, or no code, at this place."""


@dataclass(frozen=True, slots=True)
class SpeechOffer:
    """What a checkpoint can do.

    Attributes:
        sample_rate: Of the sound that it makes, Hz.
        voices: Its speakers, in its own spelling, the default one first; empty if it has none.
        languages: Names of the languages that can be asked for; empty if none can.
        tasks: What `SpeechRequest.task` may be; empty for families without tasks.
        instructions: It reads `SpeechRequest.instructions`.
        max_references: Most recordings per request; 0 if it cannot clone voices.
        needs_reference: It has no voice but that of a recording (or a speaker embedding).
        needs_transcript: A recording is of no use without what is said in it, unless
            `x_vector_only`.
        reads_transcripts: It reads what is said in a recording.
        speaker_embeddings: Of a recording it can take the speaker alone (`x_vector_only`), or be
            given that as an embedding; if it can clone voices at all.
        embedding_size: Numbers of a speaker embedding; None where that is not known, or none is
            taken.
        streams_text: A text can follow one token per frame (`non_streaming` is false).
        reference_seconds: Shortest and longest recording.
        voice_beside_references: A voice can be named beside recordings: they are what was said
            before, and by whom is for the family to know.
        unread_sampling: Sampling parameters that change nothing, as it draws its codes itself.
        extra: Names of the options that it reads from `SpeechRequest.extra`.
        check: What else may be wrong with a request that keeps all this, its voice resolved: raises
            `OmniClientError`, which names the attribute. Called before anything is encoded.
    """

    sample_rate: int
    voices: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    instructions: bool = False
    max_references: int = 0
    needs_reference: bool = False
    needs_transcript: bool = False
    reads_transcripts: bool = True
    speaker_embeddings: bool = True
    embedding_size: int | None = None
    streams_text: bool = True
    reference_seconds: tuple[float, float] = (1.0, 30.0)
    voice_beside_references: bool = False
    unread_sampling: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()
    check: Callable[[SpeechRequest], object] | None = None

    def refused_embedding(self, embedding: np.ndarray) -> str | None:
        """What is wrong with a speaker embedding, float32 [d]; None if nothing is."""
        if self.embedding_size not in (None, len(embedding)):
            return f"should have {self.embedding_size} numbers, not {len(embedding)}"
        return None if embedding.any() else "is all zero"


EncodedReference = Mapping[str, torch.Tensor]
"""What the codec stage made of a recording, by names that the family knows; on the CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPrompt:
    """What a codec language model is fed, position by position; the parts of one are summed.

    The first `length` positions are the prompt, the others are those of the first decode steps
    (the frame that was generated is added to them). After them the model's pad row is fed.

    Attributes:
        length: Positions of the prompt.
        text: int32 [n], text token of each position, or `NOTHING`; n >= length.
        codes: int32 [n, groups], codec frame of each position; any of it may be `NOTHING`. Group 0
            takes special codes, too. None for models whose frames are no codes.
        vectors: Further vectors [hidden_size], by position; of models whose frames are vectors,
            frames of recordings.
        placeholder: The token id that stands for every position of the prompt. Penalties see it.
        reference_codes: int32 [frames, groups], or frames that are vectors, for the codec decoder:
            what the sound is to be decoded after; None for nothing.
        context: What else decides what positions come to, as a text does that an encoder reads as
            a whole. Prompts share their beginnings only if theirs are equal.
    """

    length: int
    text: torch.Tensor
    codes: torch.Tensor | None
    placeholder: int
    vectors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    reference_codes: torch.Tensor | None = None
    context: bytes = b""


class SpeechFamily(Protocol):
    """How a family's requests are made; one object per deployment, used from any thread.

    Attributes:
        offer: What the checkpoint can do.
        encoder_rate: Rate at which the codec stage takes recordings, Hz.
    """

    offer: SpeechOffer
    encoder_rate: int

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """The codec language model's whole input.

        Args:
            request: Checked against `offer`.
            references: One per recording of it.

        Raises:
            OmniClientError: Names the field at fault.
        """
        ...


class SpeechFamilyFactory(Protocol):
    """Makes a deployment's `SpeechFamily`; what a `Pipeline` names as `speech`."""

    def __call__(
        self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike
    ) -> SpeechFamily:
        """See the class.

        Args:
            config: The checkpoint's.
            model: Its folder or hub name.
            tokenizer: Its own.
        """
        ...
