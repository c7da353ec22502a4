# SPDX-License-Identifier: Apache-2.0
"""Routes of other kinds of model: a 404 that says what this server makes, and by which route."""

from collections.abc import Collection
from http import HTTPStatus

from fastapi import APIRouter, Request

from vllm_omni.errors import OmniClientError

ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/videos/sync"),
    *("/v1/audio/generate", "/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/voices"),
)
"""Of any server of this project, where a request may come to the wrong one."""


def elsewhere(makes: str, route: str, taken: Collection[str]) -> APIRouter:
    """A router for what this server has not; to be included last.

    Args:
        makes: What the server makes.
        route: Where.
        taken: Paths that the server has.
    """
    router = APIRouter(include_in_schema=False)

    async def refuse(request: Request) -> None:
        raise OmniClientError(
            f"{request.method} {request.url.path}: this server makes {makes}; use {route}",
            HTTPStatus.NOT_FOUND,
            "NotFoundError",
        )

    for path in ROUTES:
        if path not in taken:
            router.add_api_route(path, refuse, methods=["GET", "POST"], response_model=None)
    return router
