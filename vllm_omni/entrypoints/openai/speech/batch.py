# SPDX-License-Identifier: Apache-2.0
"""Many texts in one request, each with its own result."""

import asyncio
from typing import Any

import pybase64
from pydantic import ValidationError

from vllm_omni.entrypoints.openai.error_handlers import error_object, validation_error_body
from vllm_omni.entrypoints.openai.protocol.speech import (
    BatchBody,
    BatchItem,
    BatchResponse,
    BatchResult,
)
from vllm_omni.entrypoints.openai.speech.asking import Asking
from vllm_omni.entrypoints.openai.speech.service import Speech
from vllm_omni.entrypoints.openai.speech.utterance import Utterance
from vllm_omni.media.audio_encode import CONTENT_TYPES

MAX_AT_A_TIME = 16
"""Texts of one batch that are spoken at a time: others want to speak too."""


class Batch:
    """One request for many texts.

    Args:
        speech: Who speaks.
        body: What.
        request_id: The engine's name for it; each text's has its number behind it.
    """

    def __init__(self, speech: Speech, body: BatchBody, request_id: str) -> None:
        self._speech = speech
        self._body = body
        self._request_id = request_id
        self._asking: Asking = speech.asking()
        self._turns = asyncio.Semaphore(MAX_AT_A_TIME)

    async def answer(self) -> BatchResponse:
        """All results, in order; what is wrong with a text is its own."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(i)) for i in range(len(self._body.items))]
        results = [task.result() for task in tasks]
        succeeded = sum(result.status == "success" for result in results)
        return BatchResponse(
            results=results,
            total=len(results),
            succeeded=succeeded,
            failed=len(results) - succeeded,
        )

    async def _one(self, index: int) -> BatchResult:
        async with self._turns:
            try:
                return await self._spoken(index)
            except ValidationError as error:
                return _failed(index, validation_error_body(error, self._body.items[index]))
            except Exception as error:  # the client is told, and the other texts are spoken
                return _failed(index, error_object(error, f"{self._request_id}-{index}"))

    async def _spoken(self, index: int) -> BatchResult:
        given = BatchItem.model_validate(self._body.items[index])
        item = BatchItem.model_validate(given.over(self._body))
        self._speech.served_name(item.model)
        asked = await self._asking.asked(item.input, item)
        utterance = Utterance(self._speech, asked, f"{self._request_id}-{index}")
        data = await utterance.file()
        encoded = await asyncio.to_thread(pybase64.b64encode, data)
        return BatchResult(
            index=index,
            status="success",
            audio_data=encoded.decode(),
            media_type=CONTENT_TYPES[item.format],
            usage=utterance.usage,
        )


def _failed(index: int, body: dict[str, dict[str, Any]]) -> BatchResult:
    return BatchResult(index=index, status="error", error=body["error"])
