# SPDX-License-Identifier: Apache-2.0
"""How media of a request is loaded: vLLM's connector, with clear errors and closed doors.

It is registered in vLLM's connector registry and chosen by vLLM's `VLLM_MEDIA_CONNECTOR`. vLLM's
own limits (`VLLM_MAX_IMAGE_PIXELS`, `VLLM_MAX_AUDIO_DECODE_DURATION_S`,
`VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB`, ...) hold as well. Decoding runs in vLLM's thread pool.
"""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
import pybase64
from vllm import envs
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.exceptions import VLLMError
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    AudioMediaIO,
    ImageMediaIO,
    MediaConnector,
    MediaIO,
    VideoMediaIO,
)

from vllm_omni.entrypoints.openai.large_bodies import payload_of
from vllm_omni.entrypoints.openai.public_http import public_http_connection
from vllm_omni.errors import OmniClientError
from vllm_omni.media.decode import check_audio, check_image, check_video
from vllm_omni.media.limits import DEFAULT_LIMITS, MediaLimits
from vllm_omni.media.resample import resample

CONNECTOR_NAME = "vllm_omni"

_T = TypeVar("_T")
_CHECKS = {"audio": check_audio, "image": check_image, "video": check_video}
_KINDS: dict[type[MediaIO[Any]], str] = {
    AudioMediaIO: "audio",
    ImageMediaIO: "image",
    VideoMediaIO: "video",
}


def use_omni_media_connector() -> None:
    """Make vLLM load media through `OmniMediaConnector`, unless the user chose another one."""
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)
class OmniMediaConnector(MediaConnector):
    """vLLM's connector; whatever is wrong with a client's media is a 4xx that says so.

    Remote media comes from public addresses only, unless `--allowed-media-domains` names its host.
    """

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
    ) -> None:
        chosen = {} if allowed_media_domains else {"connection": public_http_connection}
        super().__init__(
            media_io_kwargs,
            allowed_local_media_path=allowed_local_media_path,
            allowed_media_domains=allowed_media_domains,
            **chosen,
        )

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[_T], *, fetch_timeout: int | None = None
    ) -> _T:
        """Fetch and decode. All of vLLM's `fetch_*_async` come through here."""
        checked = CheckedIO(media_io, payload_of(url))
        kind = checked.kind
        _check_scheme(url, kind, self.allowed_local_media_path is not None)
        try:
            return await super().load_from_url_async(url, checked, fetch_timeout=fetch_timeout)
        except (OmniClientError, VLLMError):
            raise
        except aiohttp.ClientResponseError as error:
            reason = f"its server answered {error.status}"
            raise _unreachable(kind, url, reason) from error
        except (OSError, aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(kind, url, str(error) or type(error).__name__) from error
        except (ValueError, NotImplementedError) as error:
            raise _invalid(kind, str(error)) from error


SOUND_RATE = 16_000
"""Hz; what the feature extractors of the served families take."""


class CheckedIO(MediaIO[_T]):
    """A `MediaIO` behind checks of the encoded bytes, whose every failure blames the client.

    Args:
        inner: What decodes.
        payload: The payload of the data URL, if it has been cut out.
    """

    def __init__(self, inner: MediaIO[_T], payload: memoryview | None = None) -> None:
        self.inner = inner
        self._payload = payload
        self.kind = _KINDS.get(type(inner), "media")

    def get_max_bytes(self) -> int | None:
        """See `MediaIO`."""
        return self.inner.get_max_bytes()

    def load_bytes(self, data: bytes) -> _T:
        """Check a file's bytes and decode them."""
        if not data:
            raise _invalid(self.kind, "it is empty")
        if self.kind in _CHECKS:
            _CHECKS[self.kind](data, media_limits(), param="messages")
        decoded = self._decode(self.inner.load_bytes, data)
        return _sane_sound(*decoded) if self.kind == "audio" else decoded

    def load_base64(self, media_type: str, data: str) -> _T:
        """Check and decode the payload of a data URL."""
        if media_type.lower() == "video/jpeg":  # vLLM's own form: frames, joined by commas
            return self._decode(self.inner.load_base64, media_type, data)
        payload = data if self._payload is None else self._payload
        return self.load_bytes(self._decode(_from_base64, payload))

    def load_file(self, filepath: Path) -> _T:
        """Check and decode a file of `--allowed-local-media-path`."""
        return self.load_bytes(filepath.read_bytes())

    def _decode(self, load: Callable[..., Any], *args: Any) -> Any:
        try:
            return load(*args)
        except (OmniClientError, VLLMError, MemoryError):
            raise
        except Exception as error:  # the decoders' errors have no common base
            raise _invalid(self.kind, str(error) or type(error).__name__) from error


def _sane_sound(samples: Any, rate: float) -> Any:
    """Finite samples in [-1, 1] at the rate that the thinkers hear.

    A sound with NaN in it would reach other requests through the KV cache; and vLLM resamples with
    torchaudio, which a CPU installation does not have.
    """
    samples = np.clip(np.nan_to_num(np.asarray(samples, dtype=np.float32)), -1.0, 1.0)
    if rate != SOUND_RATE and samples.ndim == 1:
        return resample(samples, int(rate), SOUND_RATE), SOUND_RATE
    return samples, rate


def media_limits() -> MediaLimits:
    """The limits in force: vLLM's variables where it has one, this project's for the rest."""
    return replace(
        DEFAULT_LIMITS,
        max_image_pixels=_limit(envs.VLLM_MAX_IMAGE_PIXELS),
        max_audio_seconds=_limit(envs.VLLM_MAX_AUDIO_DECODE_DURATION_S),
    )


def _limit(value: float) -> Any:
    return value if value > 0 else math.inf


def _from_base64(data: str | memoryview) -> bytes:
    return pybase64.b64decode(data, validate=True)


def _check_scheme(url: str, kind: str, files_allowed: bool) -> None:
    scheme = url.partition(":")[0].lower()
    if scheme == "file" and not files_allowed:
        raise _invalid(kind, "local files are not allowed on this server")
    if scheme not in ("http", "https", "data", "file"):
        raise _invalid(kind, "the URL must be a http, https or data URL")


def _invalid(kind: str, reason: str) -> OmniClientError:
    reason = sanitize_message(reason).rstrip(".")
    return OmniClientError(f"Invalid {kind} in `messages`: {reason}.", param="messages")


def _unreachable(kind: str, url: str, reason: str) -> OmniClientError:
    return OmniClientError(
        f"Cannot fetch the {kind} in `messages` from {url[:200]!r}: {reason}.",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "UnprocessableEntityError",
        param="messages",
    )
