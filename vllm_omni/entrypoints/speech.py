# SPDX-License-Identifier: Apache-2.0
"""From a text to speak to the input of a codec language model."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.tokenizers import cached_get_tokenizer

from vllm_omni.ar.prefix import contents_of
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.connectors import serialization
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.entrypoints.reference_cache import ReferenceCache, key_of
from vllm_omni.entrypoints.speech_checks import checked, refuse
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import media_name
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import ProgramInput, RowInput, RowPrompt
from vllm_omni.media.resample import resample
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.speech.family import (
    REFERENCE,
    EncodedReference,
    SpeechFamily,
    SpeechOffer,
    SpeechPrompt,
)
from vllm_omni.speech.request import Reference, SpeechRequest

PROMPT_KEYS = ("prompt", "additional_information", "cache_salt")
"""Of a prompt that is a mapping."""
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
            # To resample half a minute takes longer than the loop may wait.
            return await encode(await asyncio.to_thread(self.encoding, reference))

        encoded = [await self._cache.encoded(each, made) for each in request.references]
        return self.rows(request, encoded)

    def prompt_now(
        self, request: SpeechRequest, encode: Callable[[ProgramInput], EncodedReference]
    ) -> RowPrompt:
        """`prompt` for a caller without an event loop."""
        encoded = []
        for reference in request.references:
            key = key_of(reference)
            if (known := self._cache.known(key)) is None:
                known = encode(self.encoding(reference))
                self._cache.keep(key, known)
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
        refuse(
            length >= self._max_length,
            "text",
            f"it takes {length} positions, of {self._max_length} that there are for it and its "
            "speech; say it in parts",
        )
        return row_prompt(prompt, request.initial_frames, request.cache_salt)


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


def row_prompt(
    prompt: SpeechPrompt, initial_frames: int | None = None, cache_salt: str | None = None
) -> RowPrompt:
    """A family's prompt as the AR engine takes it: one row per position, those with a vector first,
    because a tensor of rows that only some positions have comes first."""
    count = len(prompt.text)
    order = [*prompt.vectors, *(i for i in range(count) if i not in prompt.vectors)]
    index = [0] * count
    for row, position in enumerate(order):
        index[position] = row
    tensors = {"text": prompt.text[order].int()}
    if prompt.codes is not None:
        tensors["codes"] = prompt.codes[order].int()
    if prompt.vectors:
        tensors["vector"] = torch.stack(list(prompt.vectors.values()))
    rows = RowInput(spans=[_inline(tensors)], index=index, kinds=bytes(count), final=True)
    beside = []
    if prompt.reference_codes is not None:
        heard = prompt.reference_codes
        heard = heard.float() if heard.is_floating_point() else heard.int()
        beside.append(_inline({"reference_codes": heard}))
    return RowPrompt(
        token_ids=[prompt.placeholder] * prompt.length,
        rows=rows,
        beside=beside,
        initial_frames=initial_frames,
        contents=contents_of(_positions(prompt)),
        cache_salt=cache_salt,
    )


def _positions(prompt: SpeechPrompt) -> Iterator[bytes]:
    """All that stands at each position of the prompt."""
    ids = prompt.text[:, None].int()
    if prompt.codes is not None:
        ids = torch.cat([ids, prompt.codes.int()], dim=1)
    ids = ids.numpy()
    for position in range(prompt.length):
        vector = prompt.vectors.get(position)
        own = b"" if vector is None else vector.numpy().tobytes()
        yield ids[position].tobytes() + own + prompt.context


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
        if key not in PROMPT_KEYS:
            raise OmniClientError(
                f"unknown key {key!r} of a prompt; it may have {', '.join(PROMPT_KEYS)} (a "
                "SpeechRequest has more)",
                param=f"prompt.{key}",
            )
    information = prompt.get("additional_information") or {}
    if not isinstance(information, Mapping):
        raise OmniClientError(
            "`additional_information` should be a mapping", param="additional_information"
        )
    for key in information:
        if key not in INFORMATION:
            raise OmniClientError(
                f"unknown key {key!r} of additional_information; it may have "
                f"{', '.join(INFORMATION)}",
                param=f"additional_information.{key}",
            )
    given = {"text": prompt.get("prompt"), "cache_salt": prompt.get("cache_salt")}
    return SpeechRequest(**{**given, **information})
