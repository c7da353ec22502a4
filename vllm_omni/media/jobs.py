# SPDX-License-Identifier: Apache-2.0
"""What a decoder process is asked to do with a file, and what it answers."""

from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import numpy as np
import pybase64
from vllm.exceptions import VLLMClientError
from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

from vllm_omni.errors import OmniClientError
from vllm_omni.media.containers import too_much
from vllm_omni.media.decode import (
    VideoInfo,
    check_image,
    check_video,
    decode_audio,
    decode_frames,
    decode_image,
)
from vllm_omni.media.hearing import as_heard
from vllm_omni.media.limits import MediaLimits
from vllm_omni.media.pixels import Picture, flattened

Output = tuple[Any, np.ndarray | None]
"""What a job makes: what is to be said about it, and an array."""
_T = TypeVar("_T", covariant=True)


class Job(Protocol[_T]):
    """Work on a file.

    Attributes:
        kind: What the file should be, for messages.
        param: The request field that it came in.
        about: What is said about the result.
    """

    kind: ClassVar[str]
    about: ClassVar[Any]

    @property
    def param(self) -> str: ...

    def run(self, data: bytes) -> Output:
        """Do it, in a decoder process. Whatever it raises is the file's fault."""
        ...


class _Job(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    limits: MediaLimits
    param: str


class SoundJob(_Job, tag=True):
    """The sound as the models hear it; its rate, Hz."""

    kind = "audio"
    about = int

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        samples, rate = decode_audio(data, self.limits, param=self.param)
        heard, rate = as_heard(samples, rate, param=self.param)
        return rate, heard


class TrackJob(_Job, tag=True):
    """The sound at its own rate, mono; that rate, Hz."""

    kind = "audio"
    about = int

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        samples, rate = decode_audio(data, self.limits, param=self.param)
        return rate, samples


class StillJob(_Job, tag=True):
    """The picture, upright, in its own mode."""

    kind = "image"
    about = Picture

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        return flattened(decode_image(data, self.limits, param=self.param))


class PictureJob(_Job, tag=True):
    """The picture as vLLM reads it; whether its mode was changed.

    Attributes:
        mode: Of `ImageMediaIO`.
        background: Of `ImageMediaIO`.
    """

    kind = "image"
    about = tuple[Picture, bool]

    mode: str | None
    background: tuple[int, int, int]

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        check_image(data, self.limits, param=self.param)
        loaded = _image_io(self.mode, self.background).load_bytes(data)
        picture, pixels = flattened(loaded.media)
        return (picture, loaded.io_config is not None), pixels


class FilmJob(_Job, tag=True):
    """What `check_video` says."""

    kind = "video"
    about = VideoInfo

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        return check_video(data, self.limits, param=self.param), None


class FramesJob(_Job, tag=True):
    """Frames of a video; their numbers.

    Attributes:
        info: What `FilmJob` said.
        wanted: The numbers of those to take.
    """

    kind = "video"
    about = list[int]

    info: VideoInfo
    wanted: list[int]

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        wanted = set(self.wanted)
        frames, found = decode_frames(data, self.info, wanted, self.limits, param=self.param)
        return found, frames


class FrameListJob(_Job, tag=True):
    """vLLM's own form of a video: pictures in base64, joined by commas. What it says about them.

    Attributes:
        mode: Of `ImageMediaIO`.
        background: Of `ImageMediaIO`.
        num_frames: Of `VideoMediaIO`: how many are taken, all if negative.
        options: Of `VideoMediaIO`.
    """

    kind = "video"
    about = dict[str, Any]

    mode: str | None
    background: tuple[int, int, int]
    num_frames: int
    options: dict[str, Any]

    def run(self, data: bytes) -> Output:
        """See `Job`."""
        text = data.decode()
        self._check(text)
        pictures = _image_io(self.mode, self.background)
        io = VideoMediaIO(pictures, self.num_frames, **self.options)
        frames, about = io.load_base64("video/jpeg", text).media
        return about, np.asarray(frames)

    def _check(self, text: str) -> None:
        given = text.count(",") + 1
        taken = min(given, self.num_frames) if self.num_frames > 0 else given
        if taken > self.limits.max_frame_list:
            raise too_much("video", "frames", taken, self.limits.max_frame_list, self.param)
        pixels = min(self.limits.max_image_pixels, self.limits.max_video_pixels)
        limits = replace(self.limits, max_image_pixels=pixels)
        size = 0
        for each in text.split(",", taken)[:taken]:
            data = pybase64.b64decode(each, validate=True)
            info = check_image(data, limits, param=self.param)
            size += info.width * info.height * 3
            if size > limits.max_decoded_bytes:
                limit = limits.max_decoded_bytes
                raise too_much("decoded video", "bytes", size, limit, self.param)


AnyJob = SoundJob | TrackJob | StillJob | PictureJob | FilmJob | FramesJob | FrameListJob


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a file.

    Attributes:
        message: In words.
        status_code: Of an `OmniClientError`; None for what a library said.
        error_type: Of an `OmniClientError`.
        param: Of an `OmniClientError`.
    """

    message: str
    status_code: int | None = None
    error_type: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        """As `error` says it."""
        match error:
            case OmniClientError():
                return cls(
                    message=error.message,
                    status_code=error.status_code,
                    error_type=error.error_type,
                    param=error.param,
                )
            case VLLMClientError() if error.args:  # its `str` adds the value
                return cls(message=str(error.args[0]))
            case MemoryError():
                return cls(message="it takes more memory than is allowed")
        return cls(message=str(error) or type(error).__name__)

    def raise_it(self) -> None:
        """Raise the `OmniClientError`, or what a library said as a `ValueError`."""
        if self.status_code is None:
            raise ValueError(self.message)
        raise OmniClientError(self.message, self.status_code, self.error_type, param=self.param)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder process says; the array comes in a file of its own.

    Attributes:
        refusal: What is wrong with the file, if anything is.
        about: What the job says about its result.
        shape: Of the array, if there is one.
        dtype: Of the array.
    """

    refusal: Refusal | None = None
    about: msgspec.Raw = msgspec.Raw(b"\xc0")
    shape: tuple[int, ...] | None = None
    dtype: str = ""


def _image_io(mode: str | None, background: tuple[int, int, int]) -> ImageMediaIO:
    return ImageMediaIO(mode, rgba_background_color=background)
