# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: vLLM's, with what its reading of earlier turns cannot take put right before.

vLLM reads the text of an earlier answer's first part: a refusal, which OpenAI's schema has there as
well, has none, and an answer may have no part at all.
"""

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request
from openai.types.responses import ResponseOutputMessage, ResponseOutputRefusal, ResponseOutputText
from vllm.entrypoints.openai.responses.api_router import create_responses as vllm_create_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from vllm_omni.entrypoints.openai.routes.errors import ERRORS
from vllm_omni.errors import OmniClientError

router = APIRouter()


@router.post(
    "/v1/responses",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={HTTPStatus.OK.value: {"content": {"text/event-stream": {}}}, **ERRORS},
)
async def create_responses(request: ResponsesRequest, raw_request: Request):
    """Answer in OpenAI's Responses protocol: vLLM's route, with earlier turns put right."""
    if isinstance(request.input, list):
        items = [_put_right(item, f"input.{i}.content") for i, item in enumerate(request.input)]
        request = request.model_copy(update={"input": items})
    return await vllm_create_responses(request, raw_request)


def _put_right(item: Any, field: str) -> Any:
    """An earlier answer's refusals become the text that they are to the model."""
    if not isinstance(item, ResponseOutputMessage):
        return item
    if not item.content:
        raise OmniClientError(f"`{field}` should not be empty", param=field)
    return item.model_copy(update={"content": [_as_text(part) for part in item.content]})


def _as_text(part: ResponseOutputText | ResponseOutputRefusal) -> ResponseOutputText:
    if isinstance(part, ResponseOutputText):
        return part
    return ResponseOutputText(type="output_text", text=part.refusal, annotations=[])
