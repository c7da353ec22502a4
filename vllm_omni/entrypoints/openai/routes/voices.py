# SPDX-License-Identifier: Apache-2.0
"""GET, POST and DELETE /v1/audio/voices."""

import asyncio
import time
import unicodedata
from http import HTTPStatus

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile

from vllm_omni.entrypoints.openai.forms import form_schema, read_form
from vllm_omni.entrypoints.openai.generation.disconnect import while_connected
from vllm_omni.entrypoints.openai.protocol.diffusion import at_fault
from vllm_omni.entrypoints.openai.protocol.voices import (
    UploadedVoice,
    VoiceDeleted,
    VoiceList,
    VoiceMade,
    VoiceUpload,
)
from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.openai.speech.asking import DEFAULT_VOICES, can_speak_as
from vllm_omni.entrypoints.openai.speech.service import Speech, speech_of
from vllm_omni.entrypoints.openai.speech.voices import (
    Voice,
    VoiceNotFoundError,
    VoiceRecord,
    checked_name,
    folded,
)
from vllm_omni.speech.family import SpeechOffer

router = APIRouter()

PATH = "/v1/audio/voices"
FILES = ("audio_sample",)
OBJECTS = ("speaker_embedding",)
MAX_FILE_NAME = 255
_NO_FILE_NAME = frozenset('/\\<>"|:*?')
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of characters that are not seen."""


@router.get(PATH, responses={HTTPStatus.OK.value: {"model": VoiceList}, **ERRORS})
async def list_voices(request: Request) -> Response:
    """The voices that can be named, and the checkpoint's languages and tasks."""
    listed = await asyncio.to_thread(_listed, speech_of(request))
    return Response(listed, media_type="application/json")


@router.get(f"{PATH}/{{name}}", responses={HTTPStatus.OK.value: {"model": UploadedVoice}, **ERRORS})
async def get_voice(name: str, request: Request) -> Response:
    """An uploaded voice."""
    found = await asyncio.to_thread(speech_of(request).voices.get, name)
    return JSONResponse(_told(found.record).model_dump())


@router.post(
    PATH,
    responses={HTTPStatus.OK.value: {"model": VoiceMade}, **ERRORS},
    openapi_extra=form_schema(VoiceUpload, FILES, objects=OBJECTS),
)
async def upload_voice(request: Request) -> Response:
    """Keep a voice, to be named in `voice` from now on."""
    speech = speech_of(request)
    if not speech.offer.max_references:
        raise at_fault("audio_sample", "this model cannot speak in the voice of a recording")
    async with read_form(
        request,
        VoiceUpload,
        files=FILES,
        objects=OBJECTS,
        max_field_bytes=request.app.state.args.max_body_bytes,
    ) as form:
        name = checked_name(form.fields.name)
        _check_is_new(name, speech)
        reading = _read(form.fields, name, form.files.get("audio_sample", []), speech)
        voice = await while_connected(request, reading)
    await asyncio.to_thread(speech.voices.add, voice)
    made = VoiceMade(voice=_told(voice.record), note=_note(voice.record, speech.offer))
    return JSONResponse(made.model_dump(exclude={"note"} if made.note is None else None))


@router.delete(
    f"{PATH}/{{name}}", responses={HTTPStatus.OK.value: {"model": VoiceDeleted}, **ERRORS}
)
async def delete_voice(name: str, request: Request) -> Response:
    """Forget an uploaded voice."""
    speech = speech_of(request)
    try:
        await asyncio.to_thread(speech.voices.delete, name)
    except VoiceNotFoundError:
        if _is_the_checkpoints(name, speech):
            raise at_fault("name", "this voice is the checkpoint's and stays") from None
        raise
    return JSONResponse(VoiceDeleted(name=name).model_dump())


def _listed(speech: Speech) -> str:
    """The answer of `list_voices`, made beside the loop: a thousand voices take their time."""
    records, offer = speech.voices.records(), speech.offer
    listed = VoiceList(
        voices=[*offer.voices, *(each.name for each in records if can_speak_as(each, offer))],
        uploaded_voices=[_told(record) for record in records],
        languages=list(offer.languages),
        tasks=list(offer.tasks),
    )
    return listed.model_dump_json()


async def _read(fields: VoiceUpload, name: str, files: list[UploadFile], speech: Speech) -> Voice:
    if len(files) + (fields.speaker_embedding is not None) != 1:
        raise at_fault("audio_sample", "should be one file, or `speaker_embedding` in place of it")
    record = VoiceRecord(
        name=name,
        consent=fields.consent,
        created_at=int(time.time()),
        ref_text=fields.ref_text or None,
        speaker_description=fields.speaker_description or None,
    )
    if fields.speaker_embedding is not None:
        embedding = np.array(fields.speaker_embedding, np.float32)
        if not speech.offer.speaker_embeddings:
            raise at_fault("speaker_embedding", "this model takes none")
        if (reason := speech.offer.refused_embedding(embedding)) is not None:
            raise at_fault("speaker_embedding", reason)
        return Voice(record, embedding=embedding)
    _check_file_name(files[0].filename or "")
    recording = await speech.recordings.uploaded(files[0], "audio_sample")
    rate = recording.sample_rate
    seconds = round(len(recording.samples) / rate, 3)
    record = msgspec.structs.replace(record, sample_rate=rate, seconds=seconds)
    return Voice(record, samples=recording.samples)


def _check_file_name(name: str) -> None:
    """A file's name is used for nothing, but one that hides something is no accident."""
    hidden = any(c in _NO_FILE_NAME or unicodedata.category(c) in _HIDDEN for c in name)
    if hidden or len(name) > MAX_FILE_NAME:
        raise at_fault("audio_sample", "its file name should be a plain one")


def _check_is_new(name: str, speech: Speech) -> None:
    if folded(name) in DEFAULT_VOICES:
        raise at_fault("name", f"{name!r} is reserved: it leaves the voice to the checkpoint")
    if _is_the_checkpoints(name, speech):
        raise at_fault("name", f"{name!r} is a voice of the checkpoint")


def _is_the_checkpoints(name: str, speech: Speech) -> bool:
    return folded(name) in map(folded, speech.offer.voices)


def _note(record: VoiceRecord, offer: SpeechOffer) -> str | None:
    """What a voice without `ref_text` needs, of a model that reads it."""
    if not offer.needs_transcript or record.ref_text or not record.seconds:
        return None
    instead = " or `x_vector_only_mode`: true" if offer.speaker_embeddings else ""
    return f"This model needs what is said in it: send `ref_text`{instead} with each request."


def _told(record: VoiceRecord) -> UploadedVoice:
    return UploadedVoice(
        name=record.name,
        consent=record.consent,
        created_at=record.created_at,
        seconds=record.seconds or None,
        sample_rate=record.sample_rate or None,
        ref_text=record.ref_text,
        speaker_description=record.speaker_description,
    )
