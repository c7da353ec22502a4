# SPDX-License-Identifier: Apache-2.0
"""Checks of a client's encoded media before they are decoded; every failure blames the client."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pybase64
from vllm import envs
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.multimodal.media import AudioMediaIO, ImageMediaIO, MediaIO, VideoMediaIO
from vllm.utils.mem_constants import MiB_bytes

from vllm_omni.entrypoints.openai.media_loading import (
    PARAM,
    load_frame_list,
    load_picture,
    load_sound,
    load_video,
)
from vllm_omni.errors import OmniClientError, OmniError
from vllm_omni.media.limits import DEFAULT_LIMITS, MediaLimits

_FRAME_LIST = "video/jpeg"
_T = TypeVar("_T")


class CheckedIO(MediaIO[_T]):
    """A `MediaIO` behind checks of the encoded bytes, whose every failure blames the client.

    Args:
        inner: What decodes.
        payload: The payload of the data URL, if it has been cut out.
    """

    def __init__(self, inner: MediaIO[_T], payload: memoryview | None = None) -> None:
        self.inner = inner
        self._payload = payload
        self.kind = _kind(inner)

    def get_max_bytes(self) -> int | None:
        """See `MediaIO`."""
        return self.inner.get_max_bytes()

    def load_bytes(self, data: bytes) -> _T:
        """Check a file's bytes and decode them."""
        if not data:
            raise invalid(self.kind, "it is empty")
        limits = media_limits()
        match self.inner:
            case AudioMediaIO():
                return self._blamed(load_sound, self.inner, data, limits)
            case VideoMediaIO():
                return self._blamed(load_video, self.inner, data, limits)
            case ImageMediaIO():
                return self._blamed(load_picture, self.inner, data, limits)
        return self._blamed(self.inner.load_bytes, data)

    def load_base64(self, media_type: str, data: str) -> _T:
        """Check and decode the payload of a data URL."""
        if media_type.lower() == _FRAME_LIST and isinstance(self.inner, VideoMediaIO):
            return self._blamed(load_frame_list, self.inner, data, media_limits())
        payload = data if self._payload is None else self._payload
        return self.load_bytes(self._blamed(_from_base64, payload))

    def load_file(self, filepath: Path) -> _T:
        """Check and decode a file of `--allowed-local-media-path`."""
        limit = media_limits().max_bytes
        if not filepath.is_file():
            raise invalid(self.kind, "there is no such file")
        if filepath.stat().st_size > limit:
            raise invalid(self.kind, f"it is larger than {limit} bytes")
        return self.load_bytes(filepath.read_bytes())

    def _blamed(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result; its failure is the client's."""
        try:
            return function(*args)
        except VLLMClientError as error:
            raise invalid(self.kind, first_argument(error)) from error
        except (OmniError, VLLMError, MemoryError):
            raise
        except Exception as error:  # the decoders' errors have no common base
            raise invalid(self.kind, str(error) or type(error).__name__) from error


def media_limits() -> MediaLimits:
    """The limits in force: vLLM's variables where it has one, this project's for the rest."""
    return replace(
        DEFAULT_LIMITS,
        max_bytes=_limit(envs.VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB * MiB_bytes),
        max_image_pixels=_limit(envs.VLLM_MAX_IMAGE_PIXELS),
        max_audio_seconds=_limit(envs.VLLM_MAX_AUDIO_DECODE_DURATION_S),
    )


def invalid(kind: str, reason: str) -> OmniClientError:
    """What to raise for a medium that is at fault."""
    reason = sanitize_message(reason).rstrip(".")
    return OmniClientError(f"Invalid {kind} in `messages`: {reason}.", param=PARAM)


def first_argument(error: Exception) -> str:
    """vLLM's message without the parameter and the value that its `str` adds."""
    return str(error.args[0]) if error.args else type(error).__name__


def _kind(inner: MediaIO[Any]) -> str:
    match inner:
        case AudioMediaIO():
            return "audio"
        case ImageMediaIO():
            return "image"
        case VideoMediaIO():
            return "video"
    return "media"


def _limit(value: float) -> Any:
    return value if value > 0 else math.inf


def _from_base64(data: str | memoryview) -> bytes:
    return pybase64.b64decode(data, validate=True)
