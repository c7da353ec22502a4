# SPDX-License-Identifier: Apache-2.0
"""vLLM's `AsyncLLM` as the front end of one AR stage replica.

Two things differ from stock: emitted rows are taken off the engine's outputs, and all outputs of an
engine step are handed over together instead of through one queue and task per request.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple, Self

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerFactory
from vllm.v1.metrics.stats import SchedulerStats

from vllm_omni.ar.grammar import grammar_refusal
from vllm_omni.ar.host import STOP_S, HostedCore
from vllm_omni.ar.wire import CONTROL_REQUEST_ID, RowUpdate, split_spans, updates_params
from vllm_omni.errors import OmniClientError
from vllm_omni.handles import RowSpan

Sink = Callable[[str, str, RequestOutput | Exception], None]
"""Takes an output of a request, by the pipeline's id and vLLM's internal one."""


class StepCollector(RequestOutputCollector):
    """One request's place in its replica's step: `put` reports to the replica."""

    def __init__(
        self,
        output_kind: RequestOutputKind,
        request_id: str,
        sink: Sink,
        pipeline_id: str,
    ) -> None:
        super().__init__(output_kind, request_id)
        self._sink = sink
        self._pipeline_id = pipeline_id

    def put(self, output: Any) -> None:
        self._sink(self._pipeline_id, self.request_id, output)


class StoppableText(NamedTuple):
    """Characters of a text, and how many of the last ones vLLM keeps back meanwhile."""

    length: int
    kept_back: int


class OmniOutputProcessor(OutputProcessor):
    """vLLM's output processor, with emitted rows taken off before it looks."""

    def __init__(self, *args: Any, discard: Callable[[RowSpan], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._discard = discard
        self._spans: dict[str, list[RowSpan]] = {}

    def take_spans(self, internal_id: str) -> tuple[RowSpan, ...]:
        """Rows of a request that arrived since the last call."""
        return tuple(self._spans.pop(internal_id, ()))

    def stoppable_text(self, internal_id: str) -> StoppableText | None:
        """The text of a request that a stop string may cut; None if none can."""
        state = self.request_states.get(internal_id)
        detokenizer = None if state is None else state.detokenizer
        if (
            not isinstance(detokenizer, BaseIncrementalDetokenizer)
            or not detokenizer.stop
            or detokenizer.include_stop_str_in_output
        ):
            return None
        return StoppableText(len(detokenizer.output_text), detokenizer.stop_buffer_length)

    def process_outputs(
        self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
    ) -> Any:
        for output in engine_core_outputs:
            output.kv_transfer_params, spans = split_spans(output.kv_transfer_params)
            if not spans:
                continue
            if output.request_id in self.request_states:
                self._spans.setdefault(output.request_id, []).extend(spans)
            else:
                for span in spans:
                    self._discard(span)
        return super().process_outputs(engine_core_outputs, *args, **kwargs)


class StageLLM(AsyncLLM):
    """Front end of one AR stage replica. Construct it outside of a running event loop.

    Args:
        discard: Frees rows of requests that are gone.
        core: The engine core, ready; None to have vLLM start one.
        tracing: Make vLLM's span for a request that has trace headers.
    """

    def __init__(
        self,
        *args: Any,
        discard: Callable[[RowSpan], None],
        core: HostedCore | None = None,
        tracing: bool = False,
        **kwargs: Any,
    ) -> None:
        self.core = core
        self._tracing = tracing
        super().__init__(
            *args, client_addresses=None if core is None else core.client_addresses, **kwargs
        )
        assert self.output_handler is None, "construct StageLLM before the event loop runs"
        self.output_processor: OmniOutputProcessor = self._new_output_processor(discard)

    def successor(
        self,
        vllm_config: VllmConfig,
        *,
        discard: Callable[[RowSpan], None],
        core: HostedCore | None = None,
    ) -> Self:
        """The front end of an engine core that takes the place of this one's, which has ended.

        It shares what prepares prompts and what counts. vLLM would make that anew, in the server's
        process and beside its requests: load tokenizers and processors, of which its cache keeps
        the last 128 sets, and process the largest picture, sound and video that the model takes,
        in a thread whose part of the heap never shrinks again.

        Args:
            vllm_config: Like this one's; no engine has used it yet.
            discard: See the class.
            core: See the class.
        """
        made = copy(self)
        made.core = core
        made.engine_core = EngineCoreClient.make_async_mp_client(
            vllm_config,
            Executor.get_class(vllm_config),
            self.log_stats,
            None if core is None else core.client_addresses,
            renderer=self.renderer,
        )
        made.output_processor = self._new_output_processor(discard)
        # What belongs to the engine core that has ended.
        made.output_handler = None
        made._profile_lock = asyncio.Lock()
        made._profile_session_active = False
        return made

    def _new_output_processor(self, discard: Callable[[RowSpan], None]) -> OmniOutputProcessor:
        return OmniOutputProcessor(
            self.renderer.tokenizer,
            log_stats=self.log_stats,
            stream_interval=self.vllm_config.scheduler_config.stream_interval,
            tracing_enabled=self._tracing,
            discard=discard,
        )

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core. What prepares prompts goes on until `close`, here and for others."""
        # Stop reading first, or the engine core's orderly end looks like its death.
        handler = self.output_handler
        if handler is not None and not handler.get_loop().is_closed():
            handler.get_loop().call_soon_threadsafe(self._stop_reading, handler)
        if self.logger_manager is not None:
            self.logger_manager.record(SchedulerStats(), None)  # what is gone has no requests
        if self.core is not None:
            self.core.stop(timeout)
        self.engine_core.shutdown(timeout=timeout or STOP_S)

    def _stop_reading(self, handler: asyncio.Task[None]) -> None:
        handler.cancel()
        # They know the replica, which knows this: sockets and threads would live until a full
        # garbage collection, which is rare in a process with so many long-lived objects.
        self.output_processor.request_states.clear()

    def tell_media_cache(self) -> None:
        """Give what the media cache was asked to whoever keeps statistics.

        vLLM does so with an engine core's outputs, which no longer come once it has died.
        """
        stats = self.renderer.stat_mm_cache()
        if stats is not None and self.logger_manager is not None:
            self.logger_manager.record(None, None, stats)

    def close(self) -> None:
        """End the rest, once no successor needs it. Idempotent."""
        self.renderer.shutdown()

    def __del__(self) -> None:
        """Nothing: stages are shut down explicitly, and at interpreter exit it is too late."""

    async def submit(
        self,
        pipeline_id: str,
        prompt: Any,
        params: SamplingParams,
        sink: Sink,
        **kwargs: Any,
    ) -> str:
        """Start a request whose outputs go to `sink`; returns vLLM's internal id.

        Where n > 1 that is the id of all n together.

        Raises what vLLM raises for an invalid request (`ValueError` and its subclasses), and
        `OmniClientError` for a prompt of a wrong kind.
        """
        process = (
            self.input_processor.process_inputs
            if isinstance(prompt, dict) and "type" in prompt
            else self.input_processor.process_inputs_async
        )
        prompt_text = kwargs.pop("prompt_text", None)
        reasoning_ended = kwargs.pop("reasoning_ended", None)
        reasoning_parser_kwargs = kwargs.pop("reasoning_parser_kwargs", None)
        tasks = await self.get_supported_tasks()
        try:
            request = process(pipeline_id, prompt, params, supported_tasks=tasks, **kwargs)
            if not isinstance(request, EngineCoreRequest):
                request = await request
        except TypeError as error:  # vLLM's word for a prompt or media of a wrong kind
            raise OmniClientError(f"`prompt`: {error}", param="prompt") from error
        except (ValueError, VLLMClientError) as error:
            if refusal := grammar_refusal(error, params):
                raise refusal from error
            raise
        self._check_media_end(request)
        if reasoning_ended is not None:
            request.reasoning_ended = reasoning_ended
        if reasoning_parser_kwargs is not None:
            request.reasoning_parser_kwargs = reasoning_parser_kwargs
        self.input_processor.assign_request_id(request)
        self._run_output_handler()
        assert isinstance(request.sampling_params, SamplingParams)
        collector = StepCollector(
            request.sampling_params.output_kind, request.request_id, sink, pipeline_id
        )
        if request.sampling_params.n == 1:
            await self._add_request(request, prompt_text, None, 0, collector)
        else:
            await self._submit_several(request, prompt_text, collector)
        return request.request_id

    def _check_media_end(self, request: EngineCoreRequest) -> None:
        """Refuse a prompt that ends with its media: models that count positions in more than one
        dimension count an end marker, and without one the engine core would end.

        Raises:
            OmniClientError: It was cut there.
        """
        if not self.model_config.uses_mrope or request.prompt_token_ids is None:
            return
        for feature in request.mm_features or ():
            place = feature.mm_position
            if place.offset + place.length >= len(request.prompt_token_ids):
                raise OmniClientError(
                    f"the prompt ends with its {feature.modality}, without the marker of its end: "
                    "it was cut there (truncation?)",
                    param="prompt",
                )

    async def _submit_several(
        self, request: EngineCoreRequest, prompt_text: str | None, collector: StepCollector
    ) -> None:
        """n > 1: one engine request per completion, as stock `add_request` fans out."""
        assert isinstance(request.sampling_params, SamplingParams)
        parent = ParentRequest(request)
        children = []
        for index in range(request.sampling_params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            children.append(child)
        for index, child in enumerate(children):
            await self._add_request(child, prompt_text, parent, index, collector)

    async def push_rows(self, updates: Sequence[RowUpdate]) -> None:
        """Append input positions to running requests, in one message."""
        await self.engine_core.add_request_async(
            EngineCoreRequest(
                request_id=CONTROL_REQUEST_ID,
                prompt_token_ids=[0],
                mm_features=None,
                sampling_params=updates_params(list(updates)),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )


class FrontEnds:
    """The front ends of one place: a replica's, and those of the replicas that replaced it."""

    def __init__(self) -> None:
        self._latest: StageLLM | None = None

    def make(
        self,
        vllm_config: VllmConfig,
        stat_loggers: list[StatLoggerFactory],
        *,
        discard: Callable[[RowSpan], None],
        core: HostedCore | None,
        tracing: bool,
    ) -> StageLLM:
        """The next one. See `StageLLM`."""
        if self._latest is None:
            self._latest = StageLLM(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,  # or vLLM would add loggers of its own
                stat_loggers=stat_loggers,
                log_requests=False,
                discard=discard,
                core=core,
                tracing=tracing,
            )
        else:
            self._latest = self._latest.successor(vllm_config, discard=discard, core=core)
        return self._latest

    def close(self) -> None:
        """End what they share. Idempotent."""
        if self._latest is not None:
            self._latest.close()
