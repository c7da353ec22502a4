# SPDX-License-Identifier: Apache-2.0
"""`/v1/audio/speech`, streamed."""

import time
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput

from vllm_omni.benchmarks.backends.calling import AnswerError, check, model_of, post
from vllm_omni.benchmarks.backends.media import items
from vllm_omni.benchmarks.backends.pcm import PcmReader
from vllm_omni.benchmarks.outputs import OmniOutput

DEFAULTS = {"voice": "default", "response_format": "pcm"}


async def speak(
    asked: RequestFuncInput, session: aiohttp.ClientSession, output: OmniOutput
) -> None:
    """Have a text spoken, and listen."""
    body: dict[str, Any] = {"model": model_of(asked), "input": asked.prompt, **DEFAULTS}
    if asked.output_len:
        body["max_new_tokens"] = asked.output_len
    if recordings := items(asked, "audio_url"):
        body["ref_audio"] = recordings[0]
    body |= asked.extra_body or {}
    sound = output.hear()
    async with post(asked, session, json=body) as response:
        await check(response)
        reader = PcmReader(body["response_format"], response.headers)
        async for piece in response.content.iter_any():
            now = time.perf_counter()
            sound.byte(now)
            sound.add(now, reader.feed(piece), reader.rate)
        output.ended()
    if not output.heard():
        raise AnswerError("the answer has no sound")
    output.sound_took_s = output.latency
