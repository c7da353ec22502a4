# SPDX-License-Identifier: Apache-2.0
"""What every server answers, for pipelines without a language model at their entry.

With one, vLLM's own routes answer these.
"""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve.instrumentator.health import health
from vllm.version import __version__ as VLLM_VERSION

import vllm_omni
from vllm_omni.errors import OmniClientError

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The model under each of its names (OpenAI's `GET /models`)."""
    served: list[BaseModelPath] = request.app.state.omni_models
    return JSONResponse({"object": "list", "data": [_card(model) for model in served]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> JSONResponse:
    """One model (OpenAI's `GET /models/{model}`)."""
    served: list[BaseModelPath] = request.app.state.omni_models
    for each in served:
        if each.name == name:
            return JSONResponse(_card(each))
    raise OmniClientError(
        f"The model {name!r} does not exist.", 404, "NotFoundError", param="model"
    )


@router.get("/version")
async def version() -> JSONResponse:
    """Versions of vLLM and of this project."""
    return JSONResponse({"version": VLLM_VERSION, "vllm_omni": vllm_omni.__version__})


@router.get("/ping", operation_id="ping_get")
@router.post("/ping", operation_id="ping_post")
async def ping(request: Request) -> Response:
    """As `/health`, under SageMaker's name."""
    return await health(request)


def _card(model: BaseModelPath) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "vllm",
        "root": model.model_path,
        "parent": None,
        "permission": [],
    }


_STARTED = int(time.time())
