# SPDX-License-Identifier: Apache-2.0
"""Recordings of voices that requests bring: fetched, checked, and decoded once (row I-16)."""

import asyncio
import binascii
import hashlib
from dataclasses import dataclass, replace

import numpy as np
import pybase64
from starlette.datastructures import UploadFile

from vllm_omni.entrypoints.openai.media_budget import current_budget
from vllm_omni.entrypoints.openai.media_checks import media_limits
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings
from vllm_omni.entrypoints.openai.protocol.diffusion import at_fault
from vllm_omni.entrypoints.openai.references import (
    InvalidInputReferenceError,
    read_upload,
    read_url,
)
from vllm_omni.entrypoints.single_flight import SingleFlightCache
from vllm_omni.errors import OmniClientError
from vllm_omni.media.decoders import decoders
from vllm_omni.media.jobs import TrackJob
from vllm_omni.media.limits import MediaLimits
from vllm_omni.speech.request import SILENT

MAX_ENTRIES = 256
MAX_CACHED_BYTES = 256 << 20
MAX_FILE_BYTES = 64 << 20
"""Of a recording: 30 s of 192 kHz in stereo and 32 bits are 46 MB."""
_PLACE = "recording"
"""What a recording is called until it is known who asks for it."""
_URL_SCHEMES = ("data", "http", "https")


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A decoded recording.

    Attributes:
        samples: float32 [n], mono, in [-1, 1]; read-only.
        sample_rate: Hz.
    """

    samples: np.ndarray
    sample_rate: int


class Recordings:
    """Reads recordings; those that were read lately are not decoded again.

    Args:
        settings: What URLs may lead to.
        seconds: Shortest and longest.
    """

    def __init__(self, settings: FetchSettings, seconds: tuple[float, float]) -> None:
        self._settings = settings
        self._seconds = seconds
        self._decoded: SingleFlightCache[Recording] = SingleFlightCache(
            MAX_ENTRIES, MAX_CACHED_BYTES, lambda each: each.samples.nbytes
        )

    async def from_source(self, source: str, param: str) -> Recording:
        """That of a URL, or of base64.

        Raises:
            OmniClientError: There is none; names `param`.
        """
        return await self.of(await self.fetched(source, param), param)

    async def fetched(self, source: str, param: str) -> bytes:
        """The file that a URL leads to, or that is there in base64.

        Raises:
            OmniClientError: There is none; names `param`.
        """
        current_budget().take_item(param)
        if source[:8].partition(":")[0].lower() in _URL_SCHEMES:
            return await read_url(source, "audio", param, self._settings)
        try:
            data = await asyncio.to_thread(pybase64.b64decode, source, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInputReferenceError(
                param,
                "should be an http(s) URL, a data URL, base64 or the name of an uploaded voice",
            ) from None
        if not data:
            raise InvalidInputReferenceError(param, "audio data is empty.")
        return data

    async def uploaded(self, upload: UploadFile, param: str) -> Recording:
        """That of an uploaded file.

        Raises:
            OmniClientError: It is none; names `param`.
        """
        return await self.of(await read_upload(upload, "audio", param, self._limits()), param)

    async def of(self, data: bytes, param: str) -> Recording:
        """That of a file.

        Raises:
            OmniClientError: It is none, or its length is out of bounds; names `param`.
        """
        if len(data) > MAX_FILE_BYTES:
            raise at_fault(param, f"is larger than {MAX_FILE_BYTES} bytes")
        key = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        try:
            return await self._decoded.get(key, lambda: asyncio.to_thread(self._decode, data))
        except OmniClientError as error:  # whoever asked first may have used another field
            message = error.message.removeprefix(f"{_PLACE}: ")
            raise at_fault(param, message.replace(_PLACE, param)) from error

    def _decode(self, data: bytes) -> Recording:
        job = TrackJob(limits=self._limits(), param=_PLACE)
        try:
            rate, samples = decoders().run(job, data)
        except OmniClientError:
            raise
        except ValueError as error:  # what a library said
            raise at_fault(_PLACE, f"cannot be read: {error}") from error
        assert samples is not None  # of a sound there are some
        self._check(samples, rate)
        samples.setflags(write=False)
        return Recording(samples, rate)

    def _check(self, samples: np.ndarray, rate: int) -> None:
        shortest, longest = self._seconds
        seconds = len(samples) / rate
        if not shortest <= seconds <= longest:
            raise at_fault(
                _PLACE, f"should last {shortest:g} to {longest:g} s, not {seconds:.2f} s"
            )
        if np.abs(samples).max() < SILENT:
            raise at_fault(_PLACE, "is silent")

    def _limits(self) -> MediaLimits:
        limits = media_limits()
        longest = min(limits.max_audio_seconds, self._seconds[1])
        return replace(
            limits,
            max_bytes=min(limits.max_bytes, MAX_FILE_BYTES),
            max_audio_seconds=longest,
        )
