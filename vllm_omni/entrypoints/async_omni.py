# SPDX-License-Identifier: Apache-2.0
"""The asynchronous front door: a pipeline as one vLLM `EngineClient`."""

import asyncio
import itertools
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.engine.launcher import LaunchedPipeline
from vllm_omni.engine.messages import (
    Abort,
    Call,
    CallResult,
    Emit,
    ErrorMessage,
    Submit,
)
from vllm_omni.entrypoints.admission import Admission
from vllm_omni.entrypoints.front_door import EngineClosedError, FrontDoor
from vllm_omni.entrypoints.output_stream import OutputStream
from vllm_omni.entrypoints.requests import RequestFactory, StageParams
from vllm_omni.entrypoints.sounds import has_sounds, with_sounds_as_heard
from vllm_omni.entrypoints.speech import encoded_reference, speech_of
from vllm_omni.errors import (
    DeadlineExceededError,
    OmniClientError,
    OmniError,
    OmniGenerateError,
    StageUnavailableError,
)
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import OmniRequestOutput, StageInfo
from vllm_omni.speech.family import EncodedReference, SpeechOffer

logger = init_logger(__name__)

DRAIN_POLL_S = 0.05


class AsyncOmni(FrontDoor, EngineClient):
    """Serves a pipeline to coroutines of one event loop. For its arguments see `FrontDoor`.

    To construct it blocks until every stage is up, a running loop as well. Every method may be
    called from the loop that first used it.

    Example:
        >>> omni = AsyncOmni(model="Qwen/Qwen3-Omni-30B-A3B-Instruct")
        >>> async def main(prompt):
        ...     async for output in omni.generate(prompt, output_modalities=["text", "audio"]):
        ...         print(output.final_output_type)
    """

    def _open(self, launched: LaunchedPipeline) -> None:
        self._launched = launched
        # A script that ends without `shutdown` ends its stages too, before vLLM's exit handlers.
        weakref.finalize(self, launched.shutdown)
        self._engine = launched.engine
        self._requests = RequestFactory(launched.plan)
        self._speech = speech_of(launched)
        # A caller's request id may come again, even while it is in use (a client that retries),
        # and then nothing that a stage says about the one request may be taken for the other's; so
        # inside of the engine every id is new.
        self._inner_ids: dict[str, set[str]] = {}
        self._serial = itertools.count()
        self._streams: dict[str, OutputStream] = {}
        limits = launched.plan.limits
        self.admission = Admission(sum(pool.capacity for pool in self._engine.pools), limits)
        self._calls: dict[str, asyncio.Future[list[Any]]] = {}
        self._dispatcher: asyncio.Task[None] | None = None
        self._fatal: BaseException | None = None
        self._draining = False
        self._closed = False
        if (entry := launched.entry_llm) is not None:
            self.vllm_config = entry.vllm_config
            self.model_config = entry.model_config
            self.renderer = entry.renderer
            self.input_processor = entry.input_processor

    @property
    def pipeline(self) -> Any:
        """The pipeline's graph."""
        return self._launched.plan.pipeline

    @property
    def diffusion_settings(self) -> DiffusionStageConfig | None:
        """Settings of the stage that takes the client's prompt, if it runs a diffusers pipeline."""
        return self._launched.plan.entry.diffusion

    @property
    def voices(self) -> tuple[str, ...]:
        """Speakers that the checkpoint offers, the default one first."""
        return self._requests.voices if self._speech is None else self._speech.offer.voices

    @property
    def speech(self) -> SpeechOffer | None:
        """What a text-to-speech pipeline offers; None of other pipelines."""
        return None if self._speech is None else self._speech.offer

    @property
    def stages(self) -> list[StageInfo]:
        """The stages and how many of their replicas live."""
        return [
            StageInfo(
                name=pool.stage.name,
                stage_id=pool.stage_id,
                engine=pool.stage.engine,
                replicas=pool.num_replicas,
                live_replicas=pool.live_num_replicas,
                final_output=pool.stage.final_output,
            )
            for pool in self._engine.pools
        ]

    def default_sampling_params(self, stage_id: int) -> SamplingParams | None:
        """A copy of a stage's defaults; None for a stage that takes none."""
        params = self._requests.defaults[stage_id]
        return None if params is None else params.clone()

    # Requests.

    async def generate(  # type: ignore[override]
        self,
        prompt: Any,
        sampling_params: SamplingParams | OmniDiffusionSamplingParams | None = None,
        request_id: str | None = None,
        *,
        sampling_params_list: Sequence[StageParams] | None = None,
        output_modalities: Sequence[str] | None = None,
        voice: str | None = None,
        timeout: float | None = None,
        **entry_kwargs: Any,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Run one request and yield its outputs as they come.

        Args:
            prompt: What vLLM's `generate` takes: rendered, text, tokens, with media.
            sampling_params: For the entry stage.
            request_id: For `abort` and the log; made up if None.
            sampling_params_list: By stage id, on top of the stages' defaults; entry 0 gives way to
                `sampling_params`.
            output_modalities: Which of the pipeline's output modalities to make; text, or what else
                it makes first, if None.
            voice: A speaker of the checkpoint, any case; None for the default.
            timeout: Seconds that the request may take; at most, and by default, what the server
                allows (`--request-timeout`).
            entry_kwargs: Passed to the entry stage (`lora_request`, `priority`, ...).

        Raises:
            OmniClientError: The request is wrong.
            OverloadedError: There are too many requests.
            DeadlineExceededError: It took too long.
            SlowClientError: Its outputs were not read.
            EngineClosedError: `shutdown` was called.
            EngineDeadError: A stage that it needs is gone.
        """
        self._check_alive()
        if self._draining:
            raise StageUnavailableError("the server is shutting down")
        self.listen()
        if request_id is not None and not isinstance(request_id, str):
            raise OmniClientError(
                f"`request_id` should be a string or None, not {type(request_id).__name__}",
                param="request_id",
            )
        request_id = request_id or f"omni-{uuid.uuid4().hex}"
        if output_modalities is None:
            output_modalities = self.pipeline.output_modalities[:1]
        if (llm := self._launched.entry_llm) is not None:
            llm.tell_media_cache()
        if self._speech is not None:
            # Recordings are looked at sample by sample.
            asked = await asyncio.to_thread(self._speech.request, prompt, voice)
            encode = partial(self._encoded, timeout=timeout)
            prompt, voice = await self._speech.prompt(asked, encode), None
        if has_sounds(prompt) and not self.pipeline.entry.takes_generation:
            prompt = await asyncio.to_thread(with_sounds_as_heard, prompt)
        make = partial(
            self._requests.make,
            prompt,
            f"{request_id}-{next(self._serial)}",
            sampling_params,
            sampling_params_list,
            output_modalities,
            voice,
            time.monotonic(),
            {key: value for key, value in entry_kwargs.items() if value is not None},
        )
        # Pictures take milliseconds to be put in order.
        submit = await asyncio.to_thread(make) if self._has_media(prompt) else make()
        async for output in self._run(request_id, submit, timeout):
            yield output

    async def _encoded(self, prompt: ProgramInput, timeout: float | None) -> EncodedReference:
        """What the codec stage makes of a recording."""
        request_id = f"reference-{uuid.uuid4().hex}"
        submit = self._requests.make_encoding(prompt, request_id)
        outputs = [output async for output in self._run(request_id, submit, timeout)]
        return encoded_reference(outputs)

    async def _run(
        self, request_id: str, submit: Submit, timeout: float | None
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Have a request take its place, and give its outputs."""
        with self._registered(request_id, submit) as stream:
            async with self.admission.working(timeout, _completions(submit)) as ticket:
                deadline = min(ticket.deadline, self.admission.deadline(timeout))
                loop = asyncio.get_running_loop()
                timer = loop.call_at(deadline, self._expire, submit.request_id)
                ended = stream.failed  # aborted while it waited
                if not ended:
                    self._engine.send(submit)
                try:
                    while True:
                        message = await stream.get()
                        ended = isinstance(message, ErrorMessage) or message.last
                        if isinstance(message, ErrorMessage):
                            raise message.to_exception()
                        message.output.request_id = request_id
                        yield message.output
                        if ended:
                            return
                finally:
                    timer.cancel()
                    if not ended:
                        self._engine.send(Abort((submit.request_id,)))

    def _has_media(self, prompt: Any) -> bool:
        """Whether a request brings media that this side has to copy."""
        if not self.pipeline.entry.takes_generation:
            return False
        return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))

    @contextmanager
    def _registered(self, request_id: str, submit: Submit) -> Iterator[OutputStream]:
        """While a request waits or runs: what comes for it, and who it is to its caller."""
        inner_id = submit.request_id
        most = self.admission.limits.max_stream_buffer_bytes
        stream = self._streams[inner_id] = OutputStream(_text_kind(submit), most)
        same = self._inner_ids.setdefault(request_id, set())
        same.add(inner_id)
        try:
            yield stream
        finally:
            del self._streams[inner_id]
            same.discard(inner_id)
            if not same:
                del self._inner_ids[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End every request of these ids, with an error for whoever waits for it."""
        for each in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            for inner_id in self._inner_ids.get(each, ()):
                self._end(inner_id, OmniGenerateError(f"request {each} was aborted"))

    def _expire(self, inner_id: str) -> None:
        self.admission.metrics.deadline_exceeded()
        self._end(inner_id, DeadlineExceededError("the request took longer than it may"))

    def _end(self, inner_id: str, error: OmniError) -> None:
        """End a request in every stage, with an error for its caller."""
        self._streams[inner_id].put(
            ErrorMessage(error=str(error), request_id=inner_id, cause=error)
        )
        self._engine.send(Abort((inner_id,)))

    def listen(self) -> None:
        """Take what the engine says, from now on: its end, too. Idempotent."""
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch(), name="omni-dispatcher")

    async def _dispatch(self) -> None:
        """Give each message to the request it belongs to (A-46, B-11)."""
        while True:
            for message in await self._engine.receive():
                if isinstance(message, CallResult):
                    self._answer(message)
                elif isinstance(message, ErrorMessage) and message.request_id is None:
                    if message.fatal:
                        self._die(message)
                elif (stream := self._streams.get(message.request_id)) is not None:
                    self._pass_on(message, stream)
                elif isinstance(message, ErrorMessage):
                    logger.debug("dropping error for unknown req %s", message.request_id)

    def _pass_on(self, message: Emit | ErrorMessage, stream: OutputStream) -> None:
        """Give a message to its caller, or end a request whose caller does not read."""
        if not stream.put(message):
            assert message.request_id is not None
            self.admission.metrics.slow_client()
            logger.warning("Request %s is aborted: nobody reads it", message.request_id)
            self._engine.send(Abort((message.request_id,)))

    def _answer(self, result: CallResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(result.error)
        else:
            future.set_result(result.results)

    def _die(self, message: ErrorMessage) -> None:
        """The orchestrator is broken: everything that waits fails."""
        self._fatal = message.cause or EngineDeadError()
        for stream in self._streams.values():
            stream.put(message)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self.dead_error)
        self._calls.clear()

    # State.

    @property
    def is_running(self) -> bool:
        return self._fatal is None and self._engine.alive

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> BaseException:
        return EngineClosedError("AsyncOmni") if self._closed else EngineDeadError()

    async def check_health(self) -> None:
        self._check_alive()
        if self._draining:
            raise EngineDeadError("the server is shutting down")
        for pool in self._engine.pools:
            if pool.live_num_replicas == 0:
                raise EngineDeadError(f"Stage-{pool.stage_id} has no live replica")

    def _check_alive(self) -> None:
        if self._closed:
            raise self.dead_error
        if not self.is_running:
            raise EngineDeadError("Orchestrator process is not alive")

    async def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait until those that run have ended.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            Whether all have ended.
        """
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self._streams

    def fail_all(self, why: str) -> None:
        """Have every request that runs fail."""
        for inner_id in self._streams:
            self._end(inner_id, StageUnavailableError(why))

    def shutdown(self, timeout: float | None = None) -> None:
        logger.info("[AsyncOmni] Shutting down")
        self._closed = True
        dispatcher, self._dispatcher = self._dispatcher, None
        self._launched.shutdown(timeout)
        if dispatcher is not None and not dispatcher.get_loop().is_closed():
            dispatcher.get_loop().call_soon_threadsafe(self._end_dispatcher, dispatcher)

    def _end_dispatcher(self, dispatcher: asyncio.Task[None]) -> None:
        """Nothing comes any more: let everything that waits fail."""
        dispatcher.cancel()
        self._die(ErrorMessage(error="the server is shut down", fatal=True))

    # Administration: every replica of every stage (or of the entry stage) that supports it.

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self._check_alive()
        self.listen()
        call_id = uuid.uuid4().hex
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._engine.send(Call(call_id=call_id, method=method, args=args, kwargs=kwargs))
        return await future

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        raise OmniClientError("this model does not serve pooling requests", 404, "NotFoundError")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        """No KV transfer between servers is set up here, so there is nothing to free."""

    async def get_supported_tasks(self) -> tuple[Any, ...]:
        if self.pipeline.entry.takes_generation:
            return ()
        return (await self._call("get_supported_tasks"))[0]

    async def is_tracing_enabled(self) -> bool:
        return self._launched.plan.traces_endpoint is not None

    async def do_log_stats(self) -> None:
        if self._launched.plan.log_stats:
            await self._call("do_log_stats")

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        await self._call("start_profile", *args, **kwargs)

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        return all(await self._call("reset_prefix_cache", *args, **kwargs))

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        await self._call("sleep", level, mode)

    async def release_kv_cache_memory(self) -> None:
        await self._call("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return all(await self._call("wake_up", tags))

    async def is_sleeping(self) -> bool:
        return any(await self._call("is_sleeping"))

    async def add_lora(self, lora_request: Any) -> bool:
        return all(await self._call("add_lora", lora_request))

    async def pause_generation(self, *args: Any, **kwargs: Any) -> None:
        await self._call("pause_generation", *args, **kwargs)

    async def resume_generation(self) -> None:
        await self._call("resume_generation")

    async def is_paused(self) -> bool:
        return any(await self._call("is_paused"))

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [
            x for results in await self._call("collective_rpc", *args, **kwargs) for x in results
        ]


def _completions(submit: Submit) -> int:
    """How many completions of its prompt a request asks for."""
    return max((p.n for p in submit.params if isinstance(p, SamplingParams)), default=1)


def _text_kind(submit: Submit) -> RequestOutputKind:
    """How the caller wants text: the entry stage's parameters say so."""
    kinds = (p.output_kind for p in submit.params if isinstance(p, SamplingParams))
    return next(kinds, RequestOutputKind.DELTA)
