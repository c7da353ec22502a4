# SPDX-License-Identifier: Apache-2.0
"""docs/reference/http.md, from the routers of the HTTP application."""

import inspect
from collections.abc import Iterable, Iterator

from fastapi import APIRouter
from fastapi.routing import APIRoute, APIWebSocketRoute

from tools.docs.tables import table
from vllm_omni.entrypoints.openai.app import GENERATION_ROUTERS, SPEECH_ROUTERS, omni_routers

INTRO = """\
# HTTP routes

Which routes a server has depends on what its model makes; one that another kind of server has is
answered with an error that says so. Each server describes its own in full, with every field, at
`/docs` and `/openapi.json`. All of them have `/health`, `/metrics`, `/v1/models` and `/version`.
"""
SERVERS = (
    (
        "Chat models (Qwen3-Omni, ...)",
        "On top of vLLM's own routes (`/v1/completions`, `/v1/audio/transcriptions`, ...). "
        "Guides: [anything to text](../tasks/x_to_text.md), [realtime](../realtime.md).",
        omni_routers(("generate",)),
    ),
    (
        "Text-to-speech models",
        "Guide: [speech](../serving/speech_api.md).",
        SPEECH_ROUTERS,
    ),
    (
        "Diffusion models",
        "Guides: [pictures and sounds](../serving/images_api.md), "
        "[videos](../serving/videos_api.md).",
        GENERATION_ROUTERS,
    ),
)


def render() -> str:
    """The page."""
    parts = [INTRO]
    for title, about, routers in SERVERS:
        head = ("method", "path", "does")
        parts += [f"## {title}\n", f"{about}\n", table(head, _rows(routers))]
    return "\n".join(parts)


def _rows(routers: Iterable[APIRouter]) -> Iterator[tuple[str, str, str]]:
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                methods = ", ".join(sorted(route.methods))
                yield methods, f"`{route.path}`", _summary(route)
            elif isinstance(route, APIWebSocketRoute):
                yield "WebSocket", f"`{route.path}`", _summary(route)


def _summary(route: APIRoute | APIWebSocketRoute) -> str:
    """The first line of what the route's function says about itself."""
    return (inspect.getdoc(route.endpoint) or "").partition("\n")[0]
