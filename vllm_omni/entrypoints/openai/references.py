# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos and sounds that a request brings: uploads, http(s) URLs and data URLs.

What is wrong with one is a 400 that names its field (rows A-41, A-47). Nothing of it is written to
disk, so nothing of it is left behind (row A-42).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pybase64
from PIL import Image
from starlette.datastructures import UploadFile
from vllm import envs

from vllm_omni.entrypoints.openai.large_bodies import payload_of
from vllm_omni.entrypoints.openai.media_budget import current_budget
from vllm_omni.entrypoints.openai.media_checks import media_limits
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings, GuardedConnection
from vllm_omni.errors import OmniClientError
from vllm_omni.media.decoders import decoders
from vllm_omni.media.jobs import FilmJob, FramesJob, StillJob, TrackJob
from vllm_omni.media.limits import MediaLimits
from vllm_omni.media.pixels import rebuilt

T = TypeVar("T")

FETCH_TIMEOUT_S = 60.0
_ANY_TYPE = ("", "application/octet-stream", "binary/octet-stream")
_TRANSPARENT = ("RGBA", "LA", "PA")


class InvalidInputReferenceError(OmniClientError):
    """A medium of the request cannot be had or is none.

    Args:
        param: The field that it came in.
        reason: What is wrong, as the rest of a sentence.
    """

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}", param=param)


@dataclass(frozen=True, slots=True)
class References:
    """Reads the media of requests.

    Attributes:
        settings: What URLs may lead to.
        max_pixels: Most pixels of a picture, or of a video's frame, that a model is given.
    """

    settings: FetchSettings
    max_pixels: int

    async def image(self, source: UploadFile | str, param: str) -> Image.Image:
        """A picture, upright, in its own mode.

        Raises:
            OmniClientError: There is none; names `param`.
        """
        data = await self._bytes(source, "image", param)
        job = StillJob(limits=self._limits(), param=param)
        return await _blamed(param, _picture, job, data)

    async def mask(
        self, source: UploadFile | str, size: tuple[int, int], param: str
    ) -> Image.Image:
        """What to repaint: white there, black elsewhere, of mode L.

        As at OpenAI it is where the mask is transparent; a mask without transparency is white
        there itself, as in diffusers.

        Raises:
            OmniClientError: There is none, or it is not of the picture's `size`.
        """
        mask = await self.image(source, param)
        if mask.size != size:
            raise InvalidInputReferenceError(
                param,
                f"should be as large as the image, {size[0]}x{size[1]}, "
                f"not {mask.width}x{mask.height}",
            )
        return await asyncio.to_thread(repainted, mask)

    async def video(self, source: UploadFile | str, param: str, max_frames: int) -> np.ndarray:
        """Frames of a video, uint8 [n, height, width, 3]: at most so many, evenly spread.

        Raises:
            OmniClientError: There is none; names `param`.
        """
        data = await self._bytes(source, "video", param)
        return await _blamed(param, _frames, data, self._limits(), param, max_frames)

    async def audio(self, source: UploadFile | str, param: str) -> tuple[np.ndarray, int]:
        """A sound: mono float32 in [-1, 1], and its sample rate in Hz.

        Raises:
            OmniClientError: There is none; names `param`.
        """
        data = await self._bytes(source, "audio", param)
        job = TrackJob(limits=self._limits(), param=param)
        rate, samples = await _blamed(param, decoders().run, job, data)
        assert samples is not None  # of a sound there are some
        return samples, rate

    async def _bytes(self, source: UploadFile | str, kind: str, param: str) -> bytes:
        current_budget().take_item(param)
        if isinstance(source, str):
            return await read_url(source, kind, param, self.settings)
        return await read_upload(source, kind, param, self._limits())

    def _limits(self) -> MediaLimits:
        limits = media_limits()
        return replace(
            limits,
            max_image_pixels=min(limits.max_image_pixels, self.max_pixels),
            max_video_pixels=min(limits.max_video_pixels, self.max_pixels),
        )


async def read_upload(upload: UploadFile, kind: str, param: str, limits: MediaLimits) -> bytes:
    """An uploaded file.

    Raises:
        InvalidInputReferenceError: It says that it is something else, or it is too large.
    """
    media_type = (upload.content_type or "").partition(";")[0].strip().lower()
    if media_type not in _ANY_TYPE and not _may_be(kind, media_type):
        raise InvalidInputReferenceError(
            param, f"should be of type {kind}/*, not {media_type[:80]!r}"
        )
    if upload.size is not None and upload.size > limits.max_bytes:
        raise InvalidInputReferenceError(param, f"is larger than {limits.max_bytes} bytes")
    data = await upload.read()
    if not data:
        raise InvalidInputReferenceError(param, f"{kind} data is empty.")
    return data


async def read_url(url: str, kind: str, param: str, settings: FetchSettings) -> bytes:
    """What a data URL holds or an http(s) URL leads to.

    Raises:
        InvalidInputReferenceError: Nothing, or it is another kind of URL.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        data = await _from_data_url(url, kind, param)
    elif scheme in ("http", "https"):
        connection = GuardedConnection(settings, current_budget())
        try:
            data = await connection.async_get_bytes(
                url,
                timeout=FETCH_TIMEOUT_S,
                allow_redirects=envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS,
            )
        except (OSError, aiohttp.ClientError, ValueError) as error:
            if isinstance(error, OmniClientError):
                raise
            raise InvalidInputReferenceError(
                param, f"failed to download {kind}. {str(error)[:300]}"
            ) from error
    else:
        raise InvalidInputReferenceError(param, "must be an http(s) URL or data URL.")
    if not data:
        raise InvalidInputReferenceError(param, f"{kind} data is empty.")
    return data


async def _from_data_url(url: str, kind: str, param: str) -> bytes:
    head, comma, payload = url.partition(",")
    media_type = head.removeprefix("data:").partition(";")[0].lower()
    if media_type not in _ANY_TYPE and not _may_be(kind, media_type):
        raise InvalidInputReferenceError(
            param, f"should be of type {kind}/*, not {media_type[:80]!r}"
        )
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidInputReferenceError(param, f"{kind} data is not valid base64.")
    whole = payload_of(url)  # of a large body it was cut out
    try:
        return await asyncio.to_thread(
            pybase64.b64decode, payload if whole is None else whole, validate=True
        )
    except ValueError:
        raise InvalidInputReferenceError(param, f"{kind} data is not valid base64.") from None


def repainted(mask: Image.Image) -> Image.Image:
    """A mask of OpenAI's or diffusers' kind as diffusers takes it."""
    if mask.mode in _TRANSPARENT or "transparency" in mask.info:
        return mask.convert("RGBA").getchannel("A").point(lambda alpha: 255 - alpha)
    return mask.convert("L")


def _may_be(kind: str, media_type: str) -> bool:
    """A sound may come in a file of a video's type."""
    families = ("audio", "video") if kind == "audio" else (kind,)
    return media_type.partition("/")[0] in families


async def _blamed(param: str, decode: Callable[..., T], *args: Any) -> T:
    """What `decode` makes, in a thread; its failure is the client's."""
    try:
        return await asyncio.to_thread(decode, *args)
    except OmniClientError:
        raise
    except ValueError as error:  # what a library said
        raise InvalidInputReferenceError(param, f"cannot be read: {error}") from error


def _picture(job: StillJob, data: bytes) -> Image.Image:
    about, pixels = decoders().run(job, data)
    assert pixels is not None  # of a picture there are some
    return rebuilt(about, pixels)


def _frames(data: bytes, limits: MediaLimits, param: str, most: int) -> np.ndarray:
    info, _ = decoders().run(FilmJob(limits=limits, param=param), data)
    numbers = np.linspace(0, info.frames - 1, min(most, info.frames)).round().astype(int)
    wanted = sorted(set(numbers.tolist()))
    job = FramesJob(limits=limits, param=param, info=info, wanted=wanted)
    _, frames = decoders().run(job, data)
    assert frames is not None  # else it has raised
    return frames
