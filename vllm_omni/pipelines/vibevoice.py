# SPDX-License-Identifier: Apache-2.0
"""VibeVoice: language model and diffusion head (sound, frame by frame) -> its packets.

Reference: transformers' `VibeVoiceForConditionalGeneration.generate`, `VibeVoiceProcessor` and the
checkpoint's chat template: voices (a recording of each speaker), then what they say. The second
stage encodes recordings; sound needs no decoding there, because the model hears each frame before
it goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex as re
import torch
from transformers import PretrainedConfig
from vllm.tokenizers import TokenizerLike

from vllm_omni.config.pipeline import Edge, EdgeContext, Pipeline, Stage
from vllm_omni.config.problems import Problem
from vllm_omni.errors import OmniClientError
from vllm_omni.framing import ChunkPolicy
from vllm_omni.pipelines.checks import equal, token_ids
from vllm_omni.pipelines.speech import CodecEdge
from vllm_omni.speech.family import NOTHING, EncodedReference, SpeechOffer, SpeechPrompt
from vllm_omni.speech.request import SpeechRequest

ARCHITECTURE = "VibeVoiceForConditionalGeneration"
SAMPLE_RATE = 24000
"""Hz, of recordings and of the sound that is made."""
SPEAKERS = ("0", "1", "2", "3")
"""Numbers are all that the model was taught; a recording each says how they sound."""
SYSTEM = (
    " Transform the text provided by various speakers into speech output, utilizing the distinct "
    "voice of each respective speaker.\n"
)
_LINE = re.compile(r"^\s*Speaker\s+(\d{1,9})\s*:\s*", re.IGNORECASE)
_IDS = ("audio_bos_token_id", "audio_eos_token_id", "audio_token_id", "eos_token_id")


def sampled_ids(config: PretrainedConfig) -> list[int]:
    """All that is ever sampled: sound begins, it ends, a frame of it, the end of all."""
    return [getattr(config, name) for name in _IDS]


def constraints(config: PretrainedConfig) -> Mapping[str, Any]:
    """The end of all stops the speech."""
    return {"stop_token_ids": [config.eos_token_id], "ignore_eos": True, "detokenize": False}


def problems(config: PretrainedConfig, model: str) -> Iterator[Problem]:
    """What is wrong with a checkpoint."""
    size = config.text_config.vocab_size
    yield from token_ids(config.to_dict(), "", _IDS, size, "text_config.vocab_size")
    acoustic, semantic = config.audio_config, config.semantic_model_config
    yield from equal(
        "semantic_model_config.hop_length",
        semantic.hop_length,
        "audio_config.hop_length",
        acoustic.hop_length,
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """Who says what."""

    speaker: str
    text: str


def turns(text: str, speaker: str) -> list[Turn]:
    """A script, whose lines may begin with `Speaker 1:`; what comes before the first such line is
    said by `speaker`, and a line without goes on with the last.

    Raises:
        OmniClientError: A line is of a speaker that there is not.
    """
    found: list[Turn] = []
    for line in text.split("\n"):
        if mark := _LINE.match(line):
            _check_speaker(mark.group(1))
            found.append(Turn(mark.group(1), line[mark.end() :]))
        elif found:
            found[-1] = Turn(found[-1].speaker, f"{found[-1].text}\n{line}")
        else:
            found.append(Turn(speaker, line))
    return [turn for turn in found if turn.text.strip()]


def _check_speaker(name: str) -> None:
    if name not in SPEAKERS:
        known = ", ".join(SPEAKERS)
        raise OmniClientError(
            f"text: a line is of speaker {name}; this model has {known}", param="text"
        )


def _check_script(request: SpeechRequest) -> None:
    """See that a script's speakers are there, and have something to say.

    Raises:
        OmniClientError: They are not, or have not.
    """
    if not turns(request.text, str(request.voice)):
        raise OmniClientError("text: its speakers have nothing to say", param="text")


class VibeVoice:
    """Prompts of one checkpoint. See `SpeechFamily`.

    Args:
        config: The checkpoint's.
        model: Its folder or hub name.
        tokenizer: Its own.
    """

    encoder_rate = SAMPLE_RATE
    offer = SpeechOffer(
        sample_rate=SAMPLE_RATE,
        voices=SPEAKERS,
        max_references=len(SPEAKERS),
        speaker_embeddings=False,
        streams_text=False,
        voice_beside_references=True,
        reads_transcripts=False,
        check=_check_script,
    )

    def __init__(self, config: PretrainedConfig, model: str, tokenizer: TokenizerLike) -> None:
        self._config = config
        self._tokenizer = tokenizer

    def prompt(
        self, request: SpeechRequest, references: Sequence[EncodedReference]
    ) -> SpeechPrompt:
        """See `SpeechFamily`; the layout of the chat template. Recordings are of speakers 0, 1, ...

        One recording alone is of the voice asked for.
        """
        assert request.voice is not None  # there is a default
        config = self._config
        text: list[int] = []
        vectors: dict[int, torch.Tensor] = {}
        before = SYSTEM + (" Voice input:\n" if references else "")
        speakers = [request.voice] if len(references) == 1 else SPEAKERS
        for speaker, encoded in zip(speakers, references, strict=False):
            text += [*self._ids(f"{before} Speaker {speaker}:"), config.audio_bos_token_id]
            for latents in encoded["latents"]:
                vectors[len(text)] = latents
                text.append(NOTHING)
            text.append(config.audio_eos_token_id)
            before = "\n"
        said = turns(request.text, request.voice)
        script = "".join(f" Speaker {turn.speaker}: {turn.text}\n" for turn in said)
        text += self._ids(f"{before} Text input:\n{script} Speech output:\n")
        text.append(config.audio_bos_token_id)
        return SpeechPrompt(
            length=len(text),
            text=torch.tensor(text),
            codes=None,
            vectors=vectors,
            # Text is never sampled.
            placeholder=text[0],
        )

    def _ids(self, text: str) -> list[int]:
        """Token ids of which none is special, whatever the text holds."""
        ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(ids["input_ids"])


def sound_to_packets(ctx: EdgeContext) -> CodecEdge:
    """Frames of 0.13 s, in windows."""
    return CodecEdge(
        ctx,
        end_ids=frozenset({ctx.config.eos_token_id}),
        drops_unfed=False,
        policy=ChunkPolicy(initial=1, steady=15),
        options={},
    )


PIPELINE = Pipeline(
    name="vibevoice",
    architectures=(ARCHITECTURE,),
    stages=(
        Stage(
            "vibevoice",
            engine="ar",
            arch="VibeVoiceTalker",
            shared_sections=("text_config",),
            emits=("sound",),
            row_driven=True,
            owns_tokenizer=True,
            # The reference never samples tokens; 40500 frames are 90 minutes.
            default_sampling={"temperature": 0.0, "max_tokens": 40500},
            sampling_constraints=constraints,
        ),
        Stage(
            "code2wav",
            engine="diffusion",
            program="vllm_omni.diffusion.programs.code2wav:vibevoice",
            config_name="audio_config",
            final_output="audio",
            also_makes=("reference",),
        ),
    ),
    edges=(Edge("vibevoice", "code2wav", sound_to_packets),),
    problems=problems,
    speech=VibeVoice,
)
