# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint can do what a `SpeechRequest` asks for; errors name its attributes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniClientError
from vllm_omni.speech.family import SpeechOffer
from vllm_omni.speech.request import MAX_SAMPLE_RATE, SILENT, Reference, SpeechRequest
from vllm_omni.speech.text import first_control, first_surrogate, is_speakable

MAX_TEXT = 100_000
"""Characters; what the checkpoint's length allows is usually less."""
DEFAULT_VOICE = "default"
"""Clients that must name a voice can say this of any checkpoint."""
MAX_SHOWN = 40
"""Names in a message."""
MAX_NAME = 64
"""Characters of a name that is none, in a message."""
OVERSHOOT = 1e-3
"""By which a sample may be outside of [-1, 1]: resampling does that."""
_FLAGS = ("x_vector_only", "non_streaming")
_OWN_NAMES = ("voice", "task", "language")


def checked(request: SpeechRequest, offer: SpeechOffer) -> SpeechRequest:
    """The request with names in the checkpoint's spelling, and arrays as the families take them.

    Raises:
        OmniClientError: It asks for what is not offered, or is of another type; names the attribute
            of `SpeechRequest`.
    """
    request = _typed(request)
    _check_text(request.text, "text")
    if request.instructions:
        refuse(not offer.instructions, "instructions", "this model takes none")
        _check_text(request.instructions, "instructions")
    frames = request.initial_frames
    if frames is not None:
        refuse(
            not _is_whole(frames) or frames < 1, "initial_frames", "should be a whole number > 0"
        )
    refuse(
        request.non_streaming is False and not offer.streams_text,
        "non_streaming",
        "the whole text stands in this model's prompt",
    )
    salt = request.cache_salt
    refuse(salt == "", "cache_salt", "should not be empty")
    if salt is not None and (position := first_surrogate(salt)) is not None:
        refuse(True, "cache_salt", f"has half a character at position {position}")
    _check_extra(request, offer)
    _check_references(request, offer)
    request = replace(
        request,
        voice=_voice(request, offer),
        task=_named("task", request.task, offer.tasks),
        language=_named("language", request.language, offer.languages),
    )
    if offer.check is not None:
        offer.check(request)
    return request


def refuse(condition: bool, field: str, why: str) -> None:
    """Raise about an attribute, if that holds."""
    if condition:
        raise OmniClientError(f"{field}: {why}", param=field)


def _typed(request: SpeechRequest) -> SpeechRequest:
    """The same, if its attributes are of the types that they should be."""
    for name in _FLAGS:
        value = getattr(request, name)
        refuse(not isinstance(value, bool | None), name, f"should be a bool, not {_kind(value)}")
    for name in (*_OWN_NAMES, "instructions", "cache_salt"):
        value = getattr(request, name)
        refuse(not isinstance(value, str | None), name, f"should be text, not {_kind(value)}")
    extra = request.extra
    refuse(not isinstance(extra, Mapping), "extra", f"should be a mapping, not {_kind(extra)}")
    return replace(
        request,
        references=_references(request.references),
        speaker_embedding=_embedding(request.speaker_embedding),
    )


def _references(given: Any) -> tuple[Reference, ...]:
    """Recordings, one or some, with samples as float32."""
    references = (given,) if isinstance(given, Reference) else given
    several = isinstance(references, list | tuple)
    refuse(not several, "references", f"should be a tuple of Reference, not {_kind(references)}")
    for each in references:
        is_one = isinstance(each, Reference)
        refuse(not is_one, "references", f"should hold Reference objects, not {_kind(each)}")
    return tuple(_reference(each) for each in references)


def _reference(reference: Reference) -> Reference:
    field, samples, rate = "references", reference.samples, reference.sample_rate
    good = isinstance(samples, np.ndarray) and np.issubdtype(samples.dtype, np.floating)
    what = f"{samples.dtype} array" if isinstance(samples, np.ndarray) else _kind(samples)
    refuse(not good, field, f"`samples` should be a NumPy array of floats in [-1, 1], not a {what}")
    refuse(samples.ndim != 1, field, f"`samples` should be mono, [n], not {list(samples.shape)}")
    finite = np.isfinite(samples).all()
    refuse(not finite, field, "`samples` should be finite numbers")
    refuse(
        not _is_whole(rate) or not 1 <= rate <= MAX_SAMPLE_RATE,
        field,
        f"`sample_rate` should be a whole number from 1 to {MAX_SAMPLE_RATE} (Hz), not {rate!r}",
    )
    peak = float(np.abs(samples).max()) if samples.size else 1.0
    refuse(
        peak > 1 + OVERSHOOT,
        field,
        f"`samples` should be in [-1, 1], and reach {peak:g}: divide what were integers",
    )
    refuse(peak < SILENT, field, "the recording is silent")
    return replace(reference, samples=samples.astype(np.float32, copy=False), sample_rate=int(rate))


def _embedding(given: Any) -> np.ndarray | None:
    if given is None:
        return None
    field = "speaker_embedding"
    try:
        vector = np.asarray(given, np.float32)
    except (TypeError, ValueError):
        raise OmniClientError(f"{field}: should hold numbers", param=field) from None
    refuse(vector.ndim != 1 or not vector.size, field, f"should be [d], not {list(vector.shape)}")
    refuse(not np.isfinite(vector).all(), field, "should hold finite numbers")
    refuse(not vector.any(), field, "is all zero")
    return vector


def _check_text(text: Any, field: str) -> None:
    refuse(not isinstance(text, str), field, f"should be text, not {_kind(text)}")
    refuse(len(text) > MAX_TEXT, field, f"{len(text)} characters, at most {MAX_TEXT} are allowed")
    if (position := first_control(text)) is not None:
        refuse(True, field, f"has the control character {text[position]!a} at position {position}")
    refuse(not is_speakable(text), field, "there is nothing to say in it")


def _check_extra(request: SpeechRequest, offer: SpeechOffer) -> None:
    for key in request.extra:
        name = str(key)[:MAX_NAME]
        refuse(
            key not in offer.extra,
            f"extra.{name}",
            f"this model does not know it{did_you_mean(name, offer.extra)}",
        )


def _check_references(request: SpeechRequest, offer: SpeechOffer) -> None:
    field, given = "references", len(request.references)
    if given:
        refuse(not offer.max_references, field, "this model cannot speak in the voice of others")
        refuse(
            given > offer.max_references,
            field,
            f"{given} recordings, this model takes {offer.max_references}",
        )
    if (embedding := request.speaker_embedding) is not None:
        taken = offer.max_references and offer.speaker_embeddings
        refuse(not taken, "speaker_embedding", "this model takes none")
        if (reason := offer.refused_embedding(embedding)) is not None:
            refuse(True, "speaker_embedding", reason)
    if request.x_vector_only:
        whole = not offer.speaker_embeddings
        refuse(whole, "x_vector_only", "this model takes a recording as a whole")
        nothing = not given and request.speaker_embedding is None
        refuse(nothing, "x_vector_only", "there is no recording to take the speaker of")
    least, most = offer.reference_seconds
    for reference in request.references:
        seconds = len(reference.samples) / reference.sample_rate
        refuse(
            not least <= seconds <= most,
            field,
            f"it lasts {seconds:.2f} s, recordings of {least:g} to {most:g} s are taken",
        )
        refuse(
            offer.needs_transcript and not request.x_vector_only and not reference.text,
            "references.text",
            "say what is spoken in the recording"
            + (", or ask for `x_vector_only`" if offer.speaker_embeddings else ""),
        )
        if reference.text is not None:
            unread = not offer.reads_transcripts
            refuse(unread, "references.text", "this model does not read what a recording says")
            _check_text(reference.text, "references.text")


def _voice(request: SpeechRequest, offer: SpeechOffer) -> str | None:
    if request.voice == DEFAULT_VOICE:
        request = replace(request, voice=None)
    recorded = bool(request.references) and not offer.voice_beside_references
    if recorded or request.speaker_embedding is not None:
        refuse(
            request.voice is not None and bool(offer.voices),
            "voice",
            "a voice and a recording were given; choose one",
        )
        return None
    if request.voice is None or not offer.voices:
        refuse(
            request.voice is None and offer.needs_reference,
            "references",
            "this model speaks in the voice of a recording, and there is none",
        )
        refuse(request.voice is not None, "voice", "this model has no voices of its own")
        return offer.voices[0] if offer.voices else None
    return _named("voice", request.voice, offer.voices)


def _named(field: str, given: str | None, known: tuple[str, ...]) -> str | None:
    """A name in the checkpoint's spelling."""
    if given is None:
        return None
    for name in known:
        if name.casefold() == given.casefold():
            return name
    have = f"this model has {shown(known)}" if known else "this model has none to choose from"
    raise OmniClientError(f"{field}: unknown {given[:MAX_NAME]!r}; {have}", param=field)


def shown(names: Sequence[str]) -> str:
    """Names, or the first of many."""
    return ", ".join(names[:MAX_SHOWN]) + (", ..." if len(names) > MAX_SHOWN else "")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return type(value).__name__
