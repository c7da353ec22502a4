# SPDX-License-Identifier: Apache-2.0
"""How each kind of endpoint is asked: request functions in the sense of vLLM's benchmark.

`ASYNC_REQUEST_FUNCS` is vLLM's registry of them, a plain dictionary of callables of the protocol
`RequestFunc`: its command line offers what is in it when the parser is made, and `benchmark` looks
a function up in it by its name. Ours are added under names of their own; nothing is replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS

from vllm_omni.benchmarks.backends.calling import Call, request_func
from vllm_omni.benchmarks.backends.chat import chat
from vllm_omni.benchmarks.backends.images import edit, paint
from vllm_omni.benchmarks.backends.realtime import converse, speak_over_socket
from vllm_omni.benchmarks.backends.speech import speak
from vllm_omni.benchmarks.backends.videos import film


@dataclass(frozen=True)
class Backend:
    """One kind of endpoint.

    Attributes:
        call: Sends a request and notes what comes.
        endpoint: Its path; others must end the same way.
        has_text: Answers have text, so tokens are counted.
        needs_image: A request brings at least one picture.
    """

    call: Call
    endpoint: str
    has_text: bool = False
    needs_image: bool = False


BACKENDS: Mapping[str, Backend] = {
    "openai-chat-omni": Backend(chat, "/v1/chat/completions", has_text=True),
    "openai-audio-speech": Backend(speak, "/v1/audio/speech"),
    "openai-realtime-chat": Backend(converse, "/v1/realtime", has_text=True),
    "openai-realtime-tts": Backend(speak_over_socket, "/v1/audio/speech/stream"),
    "openai-images-omni": Backend(paint, "/v1/images/generations"),
    "openai-image-edits-omni": Backend(edit, "/v1/images/edits", needs_image=True),
    "openai-videos-omni": Backend(film, "/v1/videos/sync"),
}


def register() -> None:
    """Make them known to vLLM's benchmark. Idempotent."""
    for name, backend in BACKENDS.items():
        if name not in ASYNC_REQUEST_FUNCS:
            ASYNC_REQUEST_FUNCS[name] = request_func(backend.call)
