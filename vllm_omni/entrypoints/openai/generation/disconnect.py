# SPDX-License-Identifier: Apache-2.0
"""Work that ends when the client leaves."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request

from vllm_omni.errors import OmniClientError

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499


class ClientGoneError(OmniClientError):
    """The client left before its answer was ready; for the log, for nobody reads it."""

    def __init__(self) -> None:
        super().__init__("the client left", CLIENT_CLOSED_REQUEST, "ClientClosedRequestError")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves.

    The body must have been read.

    Raises:
        ClientGoneError: The client left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As `asyncio.to_thread`, but a cancelled caller waits for the thread.

    So that what the thread uses (a folder, a file) can be cleared away behind it.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
