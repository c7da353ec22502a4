# SPDX-License-Identifier: Apache-2.0
"""`/v1/chat/completions` over a multi-stage pipeline.

A request for text alone is served by vLLM's own handler, untouched. For any other, the same handler
is bound to the request's `Turn`: rendering and everything about text stay vLLM's; the engine call
takes the turn's choices along, and the sound is woven in by `chat_audio`.
"""

import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.parser.abstract_parser import Parser
from vllm.renderers.chat_utils import ConversationMessage
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike

from vllm_omni.ar.grammar import FIELD as GRAMMAR_FIELD
from vllm_omni.entrypoints.openai.chat_audio import AudioCollector, AudioStream
from vllm_omni.entrypoints.openai.error_handlers import omni_error_body
from vllm_omni.entrypoints.openai.protocol.chat import OmniChatCompletionRequest
from vllm_omni.entrypoints.openai.spoken import SpokenTexts
from vllm_omni.entrypoints.openai.template_errors import template_refusal
from vllm_omni.entrypoints.openai.turn import Turn, read_turn, stage_sampling_params
from vllm_omni.errors import OmniClientError, OmniError, http_status

# Harmless per-request processor options that clients of omni models send as a matter of course.
# All others need vLLM's --trust-request-mm-kwargs, for they change what a request may cost.
HARMLESS_MM_KWARGS: Mapping[str, type] = {"use_audio_in_video": bool}
# vLLM's names for the rendered prompt and its parts; the client's field is `messages`.
_PROMPT_PARAMS = frozenset({"input_text", "input_tokens", "image", "audio", "video", "type"})
_FIRST_KEY = 'data: {"id"'


class TurnEngine:
    """The engine client as vLLM's handler sees it, with one turn's choices filled in."""

    def __init__(self, engine: EngineClient, turn: Turn, stream: bool) -> None:
        self._engine = engine
        self._turn = turn
        self._stream = stream
        self.check_admission = engine.check_admission
        self.notify_kv_transfer_request_rejected = engine.notify_kv_transfer_request_rejected

    @property
    def errored(self) -> bool:
        """See `EngineClient`."""
        return self._engine.errored

    @property
    def dead_error(self) -> BaseException:
        """See `EngineClient`."""
        return self._engine.dead_error

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Start the request in all stages that the turn needs."""
        turn = self._turn
        if turn.information:
            prompt = {**prompt, "additional_information": turn.information}
        entry, stages = stage_sampling_params(turn, self._engine, sampling_params, self._stream)
        # The transcript is part of the sound: text is always produced.
        modalities = tuple(dict.fromkeys(("text", *turn.modalities)))
        return self._engine.generate(
            prompt,
            entry,
            request_id,
            sampling_params_list=stages,
            output_modalities=modalities,
            voice=turn.voice,
            **kwargs,
        )


class OmniServingChat(OpenAIServingChat):
    """vLLM's chat handler with sound and per-stage parameters."""

    _turn: Turn | None = None

    def __init__(self, *args: Any, entry_sampling: Mapping[str, Any], **kwargs: Any) -> None:
        """As vLLM's.

        Args:
            args: See `OpenAIServingChat`.
            entry_sampling: Sampling defaults of the entry stage, above the checkpoint's own.
            kwargs: See `OpenAIServingChat`.
        """
        super().__init__(*args, **kwargs)
        self._spoken = SpokenTexts()
        self.default_sampling_params = {**self.default_sampling_params, **entry_sampling}

    async def _create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> AsyncGenerator[str, None] | ChatCompletionResponse | ErrorResponse:
        handler = self._bound(request) if isinstance(request, OmniChatCompletionRequest) else self
        try:
            return await OpenAIServingChat._create_chat_completion(handler, request, raw_request)
        except VLLMValidationError as error:
            if error.parameter in _PROMPT_PARAMS:
                raise OmniClientError(str(error.args[0]), param="messages") from error
            if refusal := template_refusal(error, request.chat_template_kwargs):
                raise refusal from error
            raise
        except OmniClientError as error:
            if error.param == GRAMMAR_FIELD and request.structured_outputs is None:
                raise OmniClientError(error.message, param="response_format") from error
            raise

    def _bound(self, request: OmniChatCompletionRequest) -> "OmniServingChat":
        """This handler, or a copy that serves one turn."""
        turn = read_turn(request, self.engine_client)
        self._spoken.fill_in(request.messages)
        harmless = _has_harmless_kwargs(request)
        if turn.is_plain and not harmless:
            return self
        handler = copy.copy(self)
        if not turn.is_plain:
            handler._turn = turn
            handler.engine_client = TurnEngine(self.engine_client, turn, bool(request.stream))
        if harmless:
            handler.online_renderer = copy.copy(self.online_renderer)
            handler.online_renderer.trust_request_mm_kwargs = True
        return handler

    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        conversation: list[ConversationMessage],
        tokenizer: TokenizerLike,
        request_metadata: RequestResponseMetadata,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_token_counts: dict[str, int] | None = None,
    ) -> AsyncGenerator[str, None]:
        """vLLM's events, with `modality` on every chunk and the turn's sound between them."""
        turn = self._turn
        woven = turn is not None and (turn.has_audio or turn.wants_metrics)
        stream = AudioStream(turn, request_id, model_name, int(time.time())) if woven else None
        chat = super().chat_completion_stream_generator(
            request,
            stream.text() if stream else result_generator,
            request_id,
            model_name,
            conversation,
            tokenizer,
            request_metadata,
            chat_template_kwargs,
            mm_token_counts,
        )
        if stream is None:
            async for event in chat:
                yield _with_modality(event)
            return
        async for event in stream.events(result_generator, chat):
            yield event
        self._remember(turn)

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        request_id: str,
        model_name: str,
        conversation: list[ConversationMessage],
        tokenizer: TokenizerLike,
        request_metadata: RequestResponseMetadata,
        parser: Parser | None = None,
        mm_token_counts: dict[str, int] | None = None,
    ) -> ErrorResponse | ChatCompletionResponse:
        """vLLM's response, with the turn's sound in `message.audio`."""
        collector = AudioCollector(self._turn) if self._turn else None
        response = await super().chat_completion_full_generator(
            request,
            collector.text(result_generator) if collector else result_generator,
            request_id,
            model_name,
            conversation,
            tokenizer,
            request_metadata,
            parser,
            mm_token_counts,
        )
        if collector is None or isinstance(response, ErrorResponse):
            return response
        finished = await collector.finish(response)
        self._remember(collector.turn)
        return finished

    def _remember(self, turn: Turn | None) -> None:
        if turn is not None and turn.has_audio:
            self._spoken.remember(turn.audio_id, turn.expires_at, turn.transcript)

    @staticmethod
    def create_error_response(
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> ErrorResponse:
        """vLLM's, with this project's errors keeping their status, type and field."""
        if not isinstance(message, OmniError):
            return create_error_response(message, err_type, status_code, param)
        described = omni_error_body(message)["error"] | {"code": http_status(message)}
        return ErrorResponse(error=ErrorInfo(**described))


def _with_modality(event: str) -> str:
    """Mark one of vLLM's chunks as text, without parsing it."""
    if event.startswith(_FIRST_KEY):
        return f'data: {{"modality":"text","id"{event[len(_FIRST_KEY) :]}'
    return event


def _has_harmless_kwargs(request: OmniChatCompletionRequest) -> bool:
    """Whether the request has processor options, and only ones that need no trust."""
    if not request.mm_processor_kwargs or request.media_io_kwargs:
        return False
    for name, value in request.mm_processor_kwargs.items():
        kind = HARMLESS_MM_KWARGS.get(name)
        if kind is None or not isinstance(value, kind):
            return False
    return True
