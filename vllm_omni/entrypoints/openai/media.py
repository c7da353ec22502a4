# SPDX-License-Identifier: Apache-2.0
"""How media of a request is loaded: vLLM's connector, with clear errors and closed doors.

It is registered in vLLM's connector registry and chosen by vLLM's `VLLM_MEDIA_CONNECTOR`. vLLM's
own limits (`VLLM_MAX_IMAGE_PIXELS`, `VLLM_MAX_AUDIO_DECODE_DURATION_S`,
`VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB`, ...) hold as well. Files are decoded in processes of their
own, for which vLLM's thread pool waits.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from vllm.exceptions import VLLMClientError, VLLMError, VLLMUnprocessableEntityError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO

from vllm_omni.entrypoints.openai.addresses import AddressPolicy, Network
from vllm_omni.entrypoints.openai.large_bodies import payload_of
from vllm_omni.entrypoints.openai.media_budget import current_budget
from vllm_omni.entrypoints.openai.media_checks import CheckedIO, first_argument, invalid
from vllm_omni.entrypoints.openai.media_fetch import FetchSettings, GuardedConnection
from vllm_omni.errors import OmniClientError

CONNECTOR_NAME = "vllm_omni"

_NOT_UNDER = "the file is not under --allowed-local-media-path"
_T = TypeVar("_T")


def use_omni_media_connector(networks: Sequence[Network] = ()) -> None:
    """Make vLLM load media through `OmniMediaConnector`, unless the user chose another one.

    Args:
        networks: Addresses that media may come from although they are not public.
    """
    settings = FetchSettings(AddressPolicy(tuple(networks)))
    connector: Any = partial(OmniMediaConnector, settings=settings)
    MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)(connector)
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", CONNECTOR_NAME)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR_NAME)
class OmniMediaConnector(MediaConnector):
    """vLLM's connector; whatever is wrong with a client's media is a 4xx that says so.

    Args:
        media_io_kwargs: See `MediaConnector`.
        allowed_local_media_path: See `MediaConnector`.
        allowed_media_domains: Hosts that media may come from, redirects included. They may have
            private addresses, for the operator has named them.
        settings: Where else media may come from.
    """

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        settings: FetchSettings | None = None,
    ) -> None:
        settings = settings or FetchSettings()
        if allowed_media_domains:
            policy = replace(settings.policy, named_hosts=True)
            settings = replace(settings, policy=policy, domains=tuple(allowed_media_domains))
        self._budget = current_budget()
        super().__init__(
            media_io_kwargs,
            GuardedConnection(settings, self._budget),
            allowed_local_media_path=allowed_local_media_path,
            allowed_media_domains=allowed_media_domains,
        )

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[_T], *, fetch_timeout: int | None = None
    ) -> _T:
        """Fetch and decode. All of vLLM's `fetch_*_async` come through here."""
        checked = CheckedIO(media_io, payload_of(url))
        kind = checked.kind
        self._budget.take_item()
        _check_url(url, kind, self.allowed_local_media_path is not None)
        try:
            return await super().load_from_url_async(url, checked, fetch_timeout=fetch_timeout)
        except VLLMUnprocessableEntityError as error:
            raise _unreachable(kind, url, first_argument(error)) from error
        except VLLMClientError as error:
            raise invalid(kind, first_argument(error)) from error
        except (OmniClientError, VLLMError):
            raise
        except OSError as error:
            raise _unreachable(kind, url, str(error) or type(error).__name__) from error
        except (ValueError, NotImplementedError) as error:
            reason = _NOT_UNDER if _scheme(url) == "file" else str(error)
            raise invalid(kind, reason) from error

    def load_from_url(
        self, url: str, media_io: MediaIO[_T], *, fetch_timeout: int | None = None
    ) -> _T:
        """As `load_from_url_async`, for data and file URLs; http cannot be had this way."""
        checked = CheckedIO(media_io)
        _check_url(url, checked.kind, self.allowed_local_media_path is not None)
        return super().load_from_url(url, checked, fetch_timeout=fetch_timeout)


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _check_url(url: str, kind: str, files_allowed: bool) -> None:
    match _scheme(url):
        case "http" | "https":
            return
        case "file":
            if not files_allowed:
                raise invalid(kind, "local files are not allowed on this server")
        case "data":
            head, comma, _ = url.partition(",")
            if not comma or not head.endswith(";base64"):
                raise invalid(kind, "a data URL must be data:TYPE;base64,DATA (base64 only)")
        case _:
            raise invalid(kind, "the URL must be a http, https or data URL")


def _unreachable(kind: str, url: str, reason: str) -> OmniClientError:
    return OmniClientError(
        f"Cannot fetch the {kind} in `messages` from {_origin(url)}: {reason.rstrip('.')}.",
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "UnprocessableEntityError",
        param="messages",
    )


def _origin(url: str) -> str:
    """Scheme and host: paths and queries of media URLs often carry a signature."""
    try:
        parts = urlsplit(url)
        return repr(f"{parts.scheme}://{parts.hostname or ''}"[:200])
    except ValueError:
        return "its URL"
