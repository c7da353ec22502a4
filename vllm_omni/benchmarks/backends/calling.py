# SPDX-License-Identifier: Apache-2.0
"""What all request functions do: send, time, and turn what goes wrong into a record of it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from tqdm.asyncio import tqdm
from vllm.benchmarks.lib.endpoint_request_func import RequestFunc, RequestFuncInput

from vllm_omni.benchmarks.outputs import RUN, OmniOutput

Call = Callable[[RequestFuncInput, aiohttp.ClientSession, OmniOutput], Awaitable[None]]
"""Sends a request and fills in the record; raises what `FAILURES` lists."""

MAX_TOLD = 500
"""Characters of a refusal that are kept."""


class AnswerError(ValueError):
    """The server refused, or its answer is none."""


FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError)
"""What a server or a network can do to a request; anything else is a fault of the benchmark."""


def request_func(call: Call) -> RequestFunc:
    """Such a function as vLLM's benchmark calls it.

    The records of measured requests, which are those with an id, go to the run as well: vLLM gives
    warm-ups and probes none.
    """

    async def request(
        request_func_input: RequestFuncInput,
        session: aiohttp.ClientSession,
        pbar: tqdm | None = None,
    ) -> OmniOutput:
        run = RUN.get()
        output = OmniOutput(prompt_len=request_func_input.prompt_len)
        output.start_time = time.perf_counter()
        try:
            async with asyncio.timeout(run.timeout_s):
                await call(request_func_input, session, output)
            output.success = True
        except FAILURES as error:
            output.error = _told(error, run.timeout_s)
            output.ended()
        if request_func_input.request_id is not None:
            run.outputs.append(output)
        if pbar is not None:
            pbar.update(1)
        return output

    return request


def _told(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no complete answer within {timeout_s:g} s (--omni-request-timeout-s)"
    if isinstance(error, AnswerError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def model_of(asked: RequestFuncInput) -> str:
    """The name by which the server knows the model."""
    return asked.model_name or asked.model


def post(
    asked: RequestFuncInput, session: aiohttp.ClientSession, **body: Any
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a request with the headers that vLLM's own have; `body`: aiohttp's `json` or `data`."""
    return session.post(asked.api_url, headers=headers_of(asked), **body)


def headers_of(asked: RequestFuncInput) -> dict[str, str]:
    """The key of OpenAI's variable, the user's own headers, the request's id."""
    headers: dict[str, str] = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    headers |= asked.extra_headers or {}
    if asked.request_id:
        headers["x-request-id"] = asked.request_id
    return headers


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise `AnswerError` with the server's words unless it answers with 200."""
    if response.status != 200:
        told = (await response.text(errors="replace"))[:MAX_TOLD]
        raise AnswerError(f"{response.status} {response.reason}: {told}")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """The objects of a stream of server-sent events, and when each came.

    Raises:
        AnswerError: One of them is an error.
    """
    async for line in _lines(response):
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise AnswerError(str(event["error"])[:MAX_TOLD])
        yield now, event


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: one event may be a second of sound, which is more than aiohttp's own."""
    parts: list[bytes] = []
    async for piece in response.content.iter_any():
        *whole, rest = piece.split(b"\n")
        for line in whole:
            yield b"".join([*parts, line]).rstrip(b"\r")
            parts = []
        parts.append(rest)
    if any(parts):
        yield b"".join(parts)
