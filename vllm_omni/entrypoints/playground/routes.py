# SPDX-License-Identifier: Apache-2.0
"""GET /playground, its files, and /playground/offer."""

import asyncio
from collections.abc import Callable, Mapping

from fastapi import APIRouter, HTTPException
from fastapi.responses import RedirectResponse, Response

from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.entrypoints.playground.assets import INDEX, OFFER_PATH, PAGE_HEADERS, PATH, Asset
from vllm_omni.entrypoints.playground.offer import Offer


def playground_router(assets: Mapping[str, Asset], offer: Callable[[], Offer]) -> APIRouter:
    """The page's routes.

    Args:
        assets: Its files by name.
        offer: What the model offers; called in a thread, for each request.
    """
    router = APIRouter()

    @router.get(OFFER_PATH, responses=ERRORS)
    async def read_offer() -> Offer:
        """What the loaded model can be asked for, as the playground needs to know it."""
        return await asyncio.to_thread(offer)

    @router.get(PATH, include_in_schema=False)
    async def page() -> Response:
        return _sent(assets[INDEX])

    @router.get(f"{PATH}/", include_in_schema=False)
    async def with_slash() -> Response:
        # Its files are beside the page: from here their relative paths would lead elsewhere.
        return RedirectResponse(f"..{PATH}")

    @router.get(f"{PATH}/{{name}}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in assets or name == INDEX:
            raise HTTPException(404)
        return _sent(assets[name])

    return router


def _sent(asset: Asset) -> Response:
    return Response(asset.data, media_type=asset.media_type, headers=dict(PAGE_HEADERS))
