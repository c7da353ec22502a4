# SPDX-License-Identifier: Apache-2.0
"""From a speech body to what the engine is asked, and back from its errors to fields of the body.

What a checkpoint does not offer is refused with the field's name, never ignored.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import normalize

import numpy as np
import regex as re

from vllm_omni.entrypoints.openai.protocol.diffusion import at_fault
from vllm_omni.entrypoints.openai.protocol.speech import SpeechOptions
from vllm_omni.entrypoints.openai.speech.limits import SpeechLimits
from vllm_omni.entrypoints.openai.speech.recordings import Recording, Recordings
from vllm_omni.entrypoints.openai.speech.voices import (
    MAX_NAME,
    Voice,
    VoiceRecord,
    VoiceStore,
    folded,
    is_name,
)
from vllm_omni.entrypoints.single_flight import SingleFlightCache
from vllm_omni.entrypoints.speech_checks import checked, shown
from vllm_omni.errors import OmniClientError
from vllm_omni.media.audio_encode import rates_of
from vllm_omni.speech.family import SpeechOffer
from vllm_omni.speech.request import Reference, SpeechRequest

DEFAULT_VOICES = ("", "default")
"""What clients that have to name a voice say to leave it to the checkpoint."""
ANY_LANGUAGE = ("", "auto")
MAX_FETCHED, MAX_FETCHED_BYTES = 16, 32 << 20
"""Files that a request or session refers to and that are kept while it lasts."""

_EXTRA_FIELDS = ("ref_audio_codes", "ambient_sound", "duration_seconds")
"""Fields that some families read, from `SpeechRequest.extra`."""
_OF_RECORDINGS = (
    *("ref_audio", "ref_audio_2", "ref_text", "speaker_embedding", "x_vector_only_mode"),
)
_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "seed": "seed",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
}
"""Fields -> sampling parameters of the first stage."""
_ENGINES_NAMES = {
    **{f"sampling_params_list.0.{theirs}": ours for ours, theirs in _SAMPLING.items()},
    **{theirs: ours for ours, theirs in _SAMPLING.items()},
    "prompt": "input",
    "text": "input",
    "task": "task_type",
    "references": "ref_audio",
    "x_vector_only": "x_vector_only_mode",
    "non_streaming": "non_streaming_mode",
    "initial_frames": "initial_codec_chunk_frames",
    "extra": "extra_params",
    "audio.voice": "voice",
}
_FLAGS = ("x_vector_only", "non_streaming")
"""Attributes that messages about others name."""
_REFERENCE_TEXT = re.compile(r"references(\.\d+)?\.text")


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the engine is asked.

    Attributes:
        request: The prompt.
        sampling: Parameters of the first stage; empty for its defaults.
        options: The body's fields about what is done with the sound.
    """

    request: SpeechRequest
    sampling: Mapping[str, Any]
    options: SpeechOptions


class Asking:
    """Reads the bodies of one HTTP request or session; what they refer to is fetched once.

    Args:
        offer: What the checkpoint can do.
        limits: What a client may ask for.
        recordings: Reads recordings.
        voices: Uploaded ones.
    """

    def __init__(
        self, offer: SpeechOffer, limits: SpeechLimits, recordings: Recordings, voices: VoiceStore
    ) -> None:
        self._offer = offer
        self._limits = limits
        self._recordings = recordings
        self._voices = voices
        self._fetched: SingleFlightCache[bytes] = SingleFlightCache(
            MAX_FETCHED, MAX_FETCHED_BYTES, len
        )

    async def asked(self, text: str, body: SpeechOptions) -> Asked:
        """What the engine is asked; it will not refuse it.

        Raises:
            OmniClientError: Names the field at fault.
        """
        if len(text) > self._limits.max_input:
            raise at_fault(
                "input",
                f"has {len(text)} characters; at most {self._limits.max_input} are taken "
                "(--tts-max-input-length)",
            )
        request = await self._request(text, body)
        try:
            if request.references:  # to look at all samples of half a minute takes its time
                await asyncio.to_thread(checked, request, self._offer)
            else:
                checked(request, self._offer)
        except OmniClientError as error:
            raise in_fields_of_speech(error) from error
        return Asked(request, self._sampling(body), body)

    async def _request(self, text: str, body: SpeechOptions) -> SpeechRequest:
        _check_rate(body)
        self._check_before_fetching(body)
        voice, uploaded = await self._voice(body)
        references = await self._references(body)
        embedding = body.speaker_embedding and np.array(body.speaker_embedding, np.float32)
        if uploaded is not None:
            if references or embedding is not None:
                raise at_fault("voice", "a voice and a recording were given; choose one")
            references = self._references_of(uploaded, body.ref_text)
            embedding = uploaded.embedding
        return SpeechRequest(
            text=text,
            voice=voice,
            task=body.task_type or None,
            language=self._language(body.language),
            instructions=body.instructions or None,
            references=references,
            speaker_embedding=embedding,
            x_vector_only=bool(body.x_vector_only_mode),
            non_streaming=body.non_streaming_mode,
            initial_frames=body.initial_codec_chunk_frames,
            extra=_extra(body),
            cache_salt=body.cache_salt,
        )

    def _check_before_fetching(self, body: SpeechOptions) -> None:
        """See to what the engine does not know, and to recordings that would be fetched in vain."""
        if body.word_timestamps:
            raise at_fault("word_timestamps", "this model has none")
        most = self._limits.max_instructions
        if len(body.instructions or "") > most:
            raise at_fault(
                "instructions",
                f"has {len(body.instructions or '')} characters; at most {most} are taken "
                "(--tts-max-instructions-length)",
            )
        if self._offer.max_references:
            return
        for name in _OF_RECORDINGS:
            if getattr(body, name):
                raise at_fault(name, "this model cannot speak in the voice of a recording")

    async def _voice(self, body: SpeechOptions) -> tuple[str | None, Voice | None]:
        """The checkpoint's speaker, or the uploaded voice, that `voice` names."""
        name = body.voice
        if name is None or folded(name) in DEFAULT_VOICES:
            return None, None
        for known in self._offer.voices:
            if folded(known) == folded(name):
                return known, None
        found = await self._uploaded(name)
        if found is None:
            also = "and those of /v1/audio/voices" if self._offer.max_references else ""
            raise unknown("voice", name, self._offer.voices, also)
        if not can_speak_as(found.record, self._offer):
            what = "a recording" if found.record.seconds else "an embedding"
            raise at_fault(
                "voice",
                f"{name!r} is an uploaded voice, and this model cannot speak in that of {what}",
            )
        return None, found

    async def _uploaded(self, name: str) -> Voice | None:
        if len(normalize("NFC", name)) > MAX_NAME:
            return None
        if not await asyncio.to_thread(self._voices.has, name):
            return None
        return await asyncio.to_thread(self._voices.get, name)

    async def _references(self, body: SpeechOptions) -> tuple[Reference, ...]:
        """The recordings that a body brings, each with what is said in it."""
        given = body.ref_audio
        sources = [given] if isinstance(given, str) else list(given or ())
        fields = ["ref_audio"] if isinstance(given, str) else _numbered("ref_audio", len(sources))
        if body.ref_audio_2 is not None:
            sources.append(body.ref_audio_2)
            fields.append("ref_audio_2")
        most = self._offer.max_references
        if len(sources) > most:
            raise at_fault(fields[most], f"this model takes {most} recordings at most")
        texts = _texts(body, len(sources))
        found = await asyncio.gather(
            *(self._reference(source, field) for source, field in zip(sources, fields, strict=True))
        )
        return tuple(
            Reference(each.samples, each.sample_rate, text or each.text)
            for each, text in zip(found, texts, strict=True)
        )

    async def _reference(self, source: str, param: str) -> Reference:
        if (voice := await self._uploaded(source)) is not None:
            if voice.samples is None:
                raise at_fault(param, "is a voice without a recording: name it in `voice`")
            return self._references_of(voice, None)[0]
        if is_name(source):  # and too short for base64 of a recording
            raise at_fault(
                param,
                f"there is no uploaded voice {source!r}; give one of those, an http(s) or data "
                "URL, or base64",
            )
        data = await self._fetched.get(source, lambda: self._recordings.fetched(source, param))
        made: Recording = await self._recordings.of(data, param)
        return Reference(made.samples, made.sample_rate)

    def _references_of(self, voice: Voice, text: str | list[str] | None) -> tuple[Reference, ...]:
        """An uploaded recording, with what a body or its upload says is said in it."""
        if voice.samples is None:
            return ()
        record = voice.record
        said = text if isinstance(text, str) else next(iter(text or ()), None)
        known = record.ref_text if self._offer.reads_transcripts else None
        return (Reference(voice.samples, record.sample_rate, said or known),)

    def _language(self, name: str | None) -> str | None:
        """A language that is asked for; none where it is left to the checkpoint, unless that has
        one of that name."""
        known = {each.casefold() for each in self._offer.languages}
        if name is None or (name.casefold() in ANY_LANGUAGE and name.casefold() not in known):
            return None
        return name

    def _sampling(self, body: SpeechOptions) -> dict[str, Any]:
        values = {theirs: getattr(body, ours) for ours, theirs in _SAMPLING.items()}
        for name in self._offer.unread_sampling:
            if values[name] is not None:
                raise at_fault(name, "this model does not read it")
        return {name: value for name, value in values.items() if value is not None}


def can_speak_as(record: VoiceRecord, offer: SpeechOffer) -> bool:
    """Whether an uploaded voice can be named."""
    return bool(offer.max_references and (record.seconds or offer.speaker_embeddings))


def in_fields_of_speech(error: OmniClientError) -> OmniClientError:
    """The engine's error in the words of the body."""
    if error.param is None:
        return error
    field = _field(error.param)
    if field == error.param and field.partition(".")[0] in error.message:
        return error
    message = error.message.removeprefix(f"{error.param}: ")
    for theirs in (error.param, *_FLAGS):
        message = message.replace(f"`{theirs}`", f"`{_field(theirs)}`")
    if field.partition(".")[0] not in message:
        message = f"{field}: {message}"
    return OmniClientError(
        message, error.status_code, error.error_type, param=field, code=error.code
    )


def unknown(param: str, name: str, known: Sequence[str], also: str = "") -> OmniClientError:
    """The error for a name that is none of those there are."""
    have = f"this model has {shown(known) or 'none of its own'}{' ' + also if also else ''}"
    return at_fault(param, f"unknown {param} {name[:MAX_NAME]!r}: {have}")


def _field(param: str) -> str:
    if param in _ENGINES_NAMES:
        return _ENGINES_NAMES[param]
    if _REFERENCE_TEXT.fullmatch(param):
        return "ref_text"
    first, dot, rest = param.partition(".")
    if first == "extra" and rest in _EXTRA_FIELDS:
        return rest
    return _ENGINES_NAMES.get(first, first) + dot + rest


def _check_rate(body: SpeechOptions) -> None:
    """See that the format can have the sample rate."""
    rates = rates_of(body.format)
    if body.sample_rate is not None and rates and body.sample_rate not in rates:
        known = ", ".join(map(str, rates))
        raise at_fault("sample_rate", f"{body.format} can have {known} Hz, not {body.sample_rate}")


def _extra(body: SpeechOptions) -> dict[str, Any]:
    """The family's own options."""
    fields = {name: getattr(body, name) for name in _EXTRA_FIELDS}
    given = {name: value for name, value in fields.items() if value is not None}
    return {**(body.extra_params or {}), **given}


def _numbered(param: str, count: int) -> list[str]:
    return [f"{param}.{i}" for i in range(count)]


def _texts(body: SpeechOptions, count: int) -> list[str | None]:
    """What is said in each recording, as far as the body tells."""
    given = body.ref_text
    texts: list[str | None] = [given] if isinstance(given, str) else list(given or ())
    if texts and count == 0 and body.voice is None:
        raise at_fault("ref_text", "is of no use without `ref_audio`")
    if len(texts) > max(count, 1):
        raise at_fault("ref_text", f"there are {len(texts)} of them, and {count} recordings")
    return [*texts, *[None] * count][:count]
