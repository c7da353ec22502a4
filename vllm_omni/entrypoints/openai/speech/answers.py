# SPDX-License-Identifier: Apache-2.0
"""How a spoken text is answered: a file as it is made, a whole file, or OpenAI's events.

The first piece is made before the status goes out, so what fails until then is a proper status.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import pybase64
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from vllm.logger import init_logger

from vllm_omni.entrypoints.openai.error_handlers import error_object
from vllm_omni.entrypoints.openai.protocol.speech import SpeechUsage
from vllm_omni.entrypoints.openai.speech.utterance import Utterance
from vllm_omni.entrypoints.openai.stage_metrics import stages_header, stages_told
from vllm_omni.errors import OmniError
from vllm_omni.media.audio_encode import CONTENT_TYPES, LOSSLESS

logger = init_logger(__name__)

CHANNELS = 1


class ClosingResponse(StreamingResponse):
    """A stream; whatever way it ends, what makes it is closed at once.

    Args:
        body: What makes it.
        media_type: Of it.
        headers: Beside that.
    """

    def __init__(
        self,
        body: AsyncGenerator[str, None] | AsyncGenerator[bytes, None],
        media_type: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(body, HTTPStatus.OK, headers, media_type)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        async with aclosing(self._body):
            await super().__call__(scope, receive, send)


class PrimedResponse(ClosingResponse):
    """A file whose first piece is there already.

    If it fails, the connection is cut, so that nobody takes what came for all there is.

    Args:
        first: The first piece; empty if there is none at all.
        rest: The others.
        request_id: For the log.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        request_id: str,
        media_type: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(rest, media_type, headers)
        self._first = first
        self._rest = rest
        self._request_id = request_id

    async def stream_response(self, send: Send) -> None:
        """Send all of it; without an end, if it fails."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        piece = self._first
        while piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            try:
                piece = await anext(self._rest, b"")
            except OmniError as error:
                logger.warning("%s is cut off: %s", self._request_id, error)
                return
            except Exception:
                logger.exception("%s is cut off", self._request_id)
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def primed(utterance: Utterance) -> Response:
    """The file as it is made."""
    pieces = utterance.pieces()
    first = await _first(pieces)
    format = utterance.asked.options.format
    headers = sound_headers(utterance)
    return PrimedResponse(first, pieces, utterance.request_id, CONTENT_TYPES[format], headers)


async def whole(utterance: Utterance, with_stages: bool = False) -> Response:
    """The file when all of it is made, with its usage, and the stages' timing if asked for."""
    data = await utterance.file()
    headers = sound_headers(utterance) | usage_headers(utterance.usage)
    if with_stages:
        headers |= stages_header(utterance.stages)
    media_type = CONTENT_TYPES[utterance.asked.options.format]
    return Response(data, HTTPStatus.OK, headers, media_type)


async def primed_events(
    utterance: Utterance, with_stages: bool = False
) -> AsyncGenerator[str, None]:
    """OpenAI's events; the first piece of sound is made when this returns.

    Args:
        utterance: What is spoken.
        with_stages: The last event has the stages' timing.
    """
    pieces = utterance.pieces()
    return _events(utterance, await _first(pieces), pieces, with_stages)


async def _events(
    utterance: Utterance, first: bytes, pieces: AsyncGenerator[bytes, None], with_stages: bool
) -> AsyncGenerator[str, None]:
    """One `delta` for each piece, then `done`, or `error`."""
    async with aclosing(pieces):
        try:
            piece = first
            while piece:
                data = pybase64.b64encode(piece).decode()
                yield _event("speech.audio.delta", audio=data)
                piece = await anext(pieces, b"")
            done: dict[str, Any] = {"usage": utterance.usage.model_dump()}
            if with_stages:
                done["metrics"] = {"stages": stages_told(utterance.stages)}
            yield _event("speech.audio.done", **done)
        except Exception as error:  # the client is told, instead of a cut connection
            yield _event("speech.audio.error", **error_object(error, utterance.request_id))


def sound_headers(utterance: Utterance) -> dict[str, str]:
    """What a client needs to play bare samples, and may like to know of others."""
    headers = {"X-Sample-Rate": str(utterance.sample_rate), "X-Channels": str(CHANNELS)}
    if utterance.asked.options.format in LOSSLESS:
        headers["X-Bits-Per-Sample"] = "16"
    return headers


def usage_headers(usage: SpeechUsage) -> dict[str, str]:
    """vLLM-Omni's names of OpenAI's usage."""
    return {
        "x-vllm-omni-input-tokens": str(usage.input_tokens),
        "x-vllm-omni-output-tokens": str(usage.output_tokens),
        "x-vllm-omni-total-tokens": str(usage.total_tokens),
    }


async def _first(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(pieces, b"")


def _event(name: str, **fields: Any) -> str:
    return f"data: {json.dumps({'type': name, **fields})}\n\n"
