# SPDX-License-Identifier: Apache-2.0
"""What the media of one request may cost together, however many messages they are spread over."""

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.errors import OmniClientError

DEFAULT_MAX_MEDIA = 256
MAX_FETCHED_BYTES = 1 << 30


class FetchedTooMuchError(OSError):
    """The URLs of a request lead to more bytes than it may have."""

    def __init__(self) -> None:
        super().__init__(f"the request fetches more than {MAX_FETCHED_BYTES} bytes in all")


@dataclass
class MediaBudget:
    """What is left for a request.

    Attributes:
        items: Media that it may still bring.
        fetched_bytes: Bytes that may still be fetched for it.
    """

    items: int = DEFAULT_MAX_MEDIA
    fetched_bytes: int = MAX_FETCHED_BYTES

    def take_item(self, param: str = "messages") -> None:
        """Count a medium that came in a field.

        Raises:
            OmniClientError: It is one too many.
        """
        self.items -= 1
        if self.items < 0:
            raise OmniClientError(
                "The request has more images, sounds and videos than are allowed "
                "(--max-media-per-request).",
                param=param,
            )

    def take_bytes(self, count: int) -> None:
        """Count bytes that were fetched.

        Raises:
            FetchedTooMuchError: They are too many.
        """
        self.fetched_bytes -= count
        if self.fetched_bytes < 0:
            raise FetchedTooMuchError


_current: ContextVar[MediaBudget | None] = ContextVar("media_budget", default=None)


def current_budget() -> MediaBudget:
    """That of the request which this task serves; a fresh one outside of any."""
    return _current.get() or MediaBudget()


class MediaBudgetMiddleware:
    """Gives each request its budget.

    Args:
        app: The next ASGI application.
        max_media: Media that a request may bring.
    """

    def __init__(self, app: ASGIApp, max_media: int = DEFAULT_MAX_MEDIA) -> None:
        self.app = app
        self.max_media = max_media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(MediaBudget(items=self.max_media))
        await self.app(scope, receive, send)
