# SPDX-License-Identifier: Apache-2.0
"""From a text to speak to the input of a codec language model."""

import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.tokenizers import cached_get_tokenizer

from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.config.problems import did_you_mean
from vllm_omni.connectors import serialization
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.entrypoints.reference_cache import ReferenceCache, key_of
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import media_name
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import ProgramInput, RowInput, RowPrompt
from vllm_omni.media.resample import resample
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.speech.family import (
    EncodedReference,
    SpeechFamily,
    SpeechOffer,
    SpeechPrompt,
)
from vllm_omni.speech.request import Reference, SpeechRequest

REFERENCE = "reference"
"""Medium of recordings, and modality of what is made of them."""
MAX_TEXT = 100_000
"""Characters; what the checkpoint's length allows is usually less."""
DEFAULT_VOICE = "default"
"""Clients that must name a voice can say this of any checkpoint."""
INFORMATION = ("voice", "initial_frames", "task", "language", "instructions", "non_streaming")

Encode = Callable[[ProgramInput], Awaitable[EncodedReference]]
"""Runs a recording through the codec stage."""


class Speech:
    """Makes the requests of a text-to-speech deployment.

    Args:
        plan: The deployment; its pipeline speaks.
        max_length: Positions that the entry stage takes, those of the speech included.
    """

    def __init__(self, plan: DeploymentPlan, max_length: int) -> None:
        assert plan.pipeline.speech is not None
        args = plan.entry.engine_args
        tokenizer = cached_get_tokenizer(
            args.get("tokenizer") or plan.model,
            trust_remote_code=args.get("trust_remote_code", False),
            revision=args.get("tokenizer_revision") or args.get("revision"),
        )
        self._family: SpeechFamily = plan.pipeline.speech(plan.hf_config, plan.model, tokenizer)
        self._cache = ReferenceCache()
        self._max_length = max_length

    @property
    def offer(self) -> SpeechOffer:
        """What the checkpoint can do."""
        return self._family.offer

    def request(self, prompt: Any, voice: str | None) -> SpeechRequest:
        """What a caller of `generate` wants, checked against what there is.

        Args:
            prompt: A `SpeechRequest`, text, or a mapping with `prompt`.
            voice: Named beside the prompt.

        Raises:
            OmniClientError: Names the field at fault.
        """
        request = _read(prompt)
        if voice is not None:
            request = replace(request, voice=voice)
        return checked(request, self.offer)

    async def prompt(self, request: SpeechRequest, encode: Encode) -> RowPrompt:
        """The entry stage's input.

        Raises:
            OmniClientError: Names the field at fault.
        """

        async def made(reference: Reference) -> EncodedReference:
            return await encode(self.encoding(reference))

        encoded = [await self._cache.encoded(each, made) for each in request.references]
        return self.rows(request, encoded)

    def prompt_now(
        self, request: SpeechRequest, encode: Callable[[ProgramInput], EncodedReference]
    ) -> RowPrompt:
        """`prompt` for a caller without an event loop."""
        encoded = []
        for reference in request.references:
            key = key_of(reference)
            if (known := self._cache.get(key)) is None:
                known = encode(self.encoding(reference))
                self._cache.put(key, known)
            encoded.append(known)
        return self.rows(request, encoded)

    def encoding(self, reference: Reference) -> ProgramInput:
        """The codec stage's input that has it encode a recording."""
        samples = reference.samples
        if reference.sample_rate != self._family.encoder_rate:
            samples = resample(samples, reference.sample_rate, self._family.encoder_rate)
        tensors = {
            media_name(REFERENCE, 0): torch.from_numpy(
                np.ascontiguousarray(samples, dtype=np.float32)
            )
        }
        return ProgramInput(options={"encode": True}, spans=[_inline(tensors)], final=True)

    def rows(self, request: SpeechRequest, references: Sequence[EncodedReference]) -> RowPrompt:
        """The entry stage's input, once recordings are encoded.

        Raises:
            OmniClientError: Nothing could be said after it.
        """
        prompt = self._family.prompt(request, references)
        length = len(prompt.text)
        _refuse(
            length >= self._max_length,
            "input",
            f"it takes {length} positions, of {self._max_length} that there are for it and its "
            "speech; say it in parts",
        )
        return row_prompt(prompt, request.initial_frames)


def speech_of(launched: LaunchedPipeline) -> Speech | None:
    """What makes the requests of a text-to-speech pipeline that runs; None for another one."""
    if launched.plan.pipeline.speech is None:
        return None
    assert launched.entry_llm is not None  # a codec language model is one
    return Speech(launched.plan, launched.entry_llm.model_config.max_model_len)


def encoded_reference(outputs: Sequence[OmniRequestOutput]) -> EncodedReference:
    """What a request for an encoded recording came to."""
    return {
        name: torch.from_numpy(array)
        for output in outputs
        for name, array in output.latents.items()
    }


def row_prompt(prompt: SpeechPrompt, initial_frames: int | None = None) -> RowPrompt:
    """A family's prompt as the AR engine takes it: one row per position, those with a vector first,
    because a tensor of rows that only some positions have comes first."""
    count = len(prompt.text)
    order = [*prompt.vectors, *(i for i in range(count) if i not in prompt.vectors)]
    index = [0] * count
    for row, position in enumerate(order):
        index[position] = row
    tensors = {"text": prompt.text[order].int(), "codes": prompt.codes[order].int()}
    if prompt.vectors:
        tensors["vector"] = torch.stack(list(prompt.vectors.values()))
    rows = RowInput(spans=[_inline(tensors)], index=index, kinds=bytes(count), final=True)
    beside = []
    if prompt.reference_codes is not None:
        beside.append(_inline({"reference_codes": prompt.reference_codes.int()}))
    return RowPrompt(
        token_ids=[prompt.placeholder] * prompt.length,
        rows=rows,
        beside=beside,
        initial_frames=initial_frames,
    )


def _inline(tensors: dict[str, torch.Tensor]) -> RowSpan:
    payload = serialization.encode(tensors)
    count = len(next(iter(tensors.values())))
    return RowSpan(0, count, TensorHandle("", payload.size, payload.to_bytes()))


def _read(prompt: Any) -> SpeechRequest:
    match prompt:
        case SpeechRequest():
            return prompt
        case str():
            return SpeechRequest(text=prompt)
        case Mapping():
            return _from_mapping(prompt)
    raise OmniClientError(
        f"`prompt` should be a SpeechRequest, text or a mapping, not {type(prompt).__name__}",
        param="prompt",
    )


def _from_mapping(prompt: Mapping[str, Any]) -> SpeechRequest:
    """`{"prompt": text, "additional_information": {...}}`."""
    for key in prompt:
        if key not in ("prompt", "additional_information"):
            raise OmniClientError(f"unknown key {key!r} of a prompt", param=f"prompt.{key}")
    information = prompt.get("additional_information") or {}
    if not isinstance(information, Mapping):
        raise OmniClientError(
            "`additional_information` should be a mapping", param="additional_information"
        )
    for key in information:
        if key not in INFORMATION:
            raise OmniClientError(
                f"unknown key {key!r} of additional_information{did_you_mean(key, INFORMATION)}",
                param=f"additional_information.{key}",
            )
    return SpeechRequest(**{"text": prompt.get("prompt"), **information})


def checked(request: SpeechRequest, offer: SpeechOffer) -> SpeechRequest:
    """The request with names in the checkpoint's spelling.

    Raises:
        OmniClientError: It asks for what is not offered; names the field.
    """
    _check_text(request.text, "input")
    if request.instructions:
        _refuse(not offer.instructions, "instructions", "this model takes none")
        _check_text(request.instructions, "instructions")
    frames = request.initial_frames
    if frames is not None:
        whole = isinstance(frames, int) and not isinstance(frames, bool) and frames >= 1
        _refuse(not whole, "initial_codec_chunk_frames", "should be a positive whole number")
    _refuse(
        request.non_streaming is False and not offer.streams_text,
        "non_streaming_mode",
        "the whole text stands in this model's prompt",
    )
    _check_extra(request, offer)
    _check_references(request, offer)
    return replace(
        request,
        voice=_voice(request, offer),
        task=_named("task_type", request.task, offer.tasks),
        language=_named("language", request.language, offer.languages),
    )


def _check_text(text: Any, field: str) -> None:
    _refuse(not isinstance(text, str), field, f"should be text, not {type(text).__name__}")
    _refuse(len(text) > MAX_TEXT, field, f"{len(text)} characters, at most {MAX_TEXT} are allowed")
    spoken = any(unicodedata.category(character)[0] in "LNS" for character in text)
    _refuse(not spoken, field, "there is nothing to say in it")


def _check_extra(request: SpeechRequest, offer: SpeechOffer) -> None:
    for name in request.extra:
        _refuse(
            name not in offer.extra,
            f"extra_params.{name}",
            f"this model does not know it{did_you_mean(name, offer.extra)}",
        )


def _check_references(request: SpeechRequest, offer: SpeechOffer) -> None:
    field = "ref_audio"
    given = len(request.references)
    if given:
        _refuse(not offer.max_references, field, "this model cannot speak in the voice of others")
        _refuse(
            given > offer.max_references,
            field,
            f"{given} recordings, this model takes {offer.max_references}",
        )
    if request.speaker_embedding is not None:
        taken = offer.max_references and offer.speaker_embeddings
        _refuse(not taken, "speaker_embedding", "this model takes none")
        finite = np.isfinite(request.speaker_embedding).all()
        _refuse(not finite, "speaker_embedding", "should hold finite numbers")
    _refuse(
        request.x_vector_only and bool(given) and not offer.speaker_embeddings,
        "x_vector_only_mode",
        "this model takes a recording as a whole",
    )
    least, most = offer.reference_seconds
    for reference in request.references:
        _refuse(reference.samples.ndim != 1, field, "should be one channel of samples")
        _refuse(
            not np.isfinite(reference.samples).all(), field, "its samples should be finite numbers"
        )
        seconds = len(reference.samples) / reference.sample_rate
        _refuse(
            not least <= seconds <= most,
            field,
            f"it lasts {seconds:.2f} s, recordings of {least:g} to {most:g} s are taken",
        )
        _refuse(
            offer.needs_transcript and not request.x_vector_only and not reference.text,
            "ref_text",
            "say what is spoken in the recording"
            + (", or ask for x_vector_only_mode" if offer.speaker_embeddings else ""),
        )
        if reference.text is not None:
            _check_text(reference.text, "ref_text")


def _voice(request: SpeechRequest, offer: SpeechOffer) -> str | None:
    if request.voice == DEFAULT_VOICE:
        request = replace(request, voice=None)
    recorded = bool(request.references) and not offer.voice_beside_references
    if recorded or request.speaker_embedding is not None:
        _refuse(
            request.voice is not None and bool(offer.voices),
            "voice",
            "a voice and a recording were given; choose one",
        )
        return None
    if request.voice is None or not offer.voices:
        _refuse(
            request.voice is None and offer.needs_reference,
            "ref_audio",
            "this model speaks in the voice of a recording, and there is none",
        )
        _refuse(request.voice is not None, "voice", "this model has no voices of its own")
        return offer.voices[0] if offer.voices else None
    return _named("voice", request.voice, offer.voices)


def _named(field: str, given: str | None, known: tuple[str, ...]) -> str | None:
    """A name in the checkpoint's spelling."""
    if given is None:
        return None
    for name in known:
        if isinstance(given, str) and name.casefold() == given.casefold():
            return name
    have = f"this model has {', '.join(known)}" if known else "this model has none to choose from"
    raise OmniClientError(f"{field}: unknown {given!r}; {have}", param=field)


def _refuse(condition: bool, field: str, why: str) -> None:
    if condition:
        raise OmniClientError(f"{field}: {why}", param=field)
