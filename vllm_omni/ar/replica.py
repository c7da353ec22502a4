# SPDX-License-Identifier: Apache-2.0
"""One replica of an AR stage, as the orchestrator sees it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.ar.frontend import StageLLM
from vllm_omni.ar.grammar import HOPELESS, is_constrained, is_stuck
from vllm_omni.ar.shown import ShownTokens
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.wire import RowUpdate, StageRequest, attach_request, frame_sampling
from vllm_omni.connectors.base import OmniConnector
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import RowInput, RowPrompt, StageInput
from vllm_omni.outputs import NO_ROOM, ErrorInfo, StageOutput, TokenOutput
from vllm_omni.replica import StageReplica

SIGN_OF_LIFE_S = 1.0


@dataclass(slots=True)
class _Live:
    """A request that has not ended: vLLM's id for it once submitted, whether its prompt has been
    reported, and whether a grammar decides what is sampled."""

    internal_id: str | None = None
    prompt_reported: bool = False
    constrained: bool = False
    shown: ShownTokens = field(default_factory=ShownTokens)


class ArReplica(StageReplica):
    """vLLM's front end and engine core of one replica, behind the replica contract.

    Args:
        llm: The front end; its engine core runs. What it prepares prompts with outlives the
            replica.
        connector: For freeing rows of requests that ended before their rows were sent on.
    """

    def __init__(self, llm: StageLLM, connector: OmniConnector) -> None:
        self.llm = llm
        self._connector = connector
        self._live: dict[str, _Live] = {}
        self._step: list[StageOutput] = []
        self._failure: Exception | None = None
        self._ready = asyncio.Event()
        self._watched: asyncio.AbstractEventLoop | None = None
        self._given_up: list[tuple[str, str, _Live, RequestOutput]] = []
        self._suspicion: asyncio.Future[None] | None = None

    async def submit(
        self, request_id: str, prompt: Any, params: Any, *, emit: bool = False, **kwargs: Any
    ) -> None:
        await self.check_health()
        if isinstance(prompt, RowPrompt):
            params = self._row_params(request_id, prompt, params, emit)
            # Without contents, two requests may share a prompt and yet have different rows, so the
            # prefix cache must never take one's blocks for the other's.
            salt = prompt.cache_salt if prompt.contents else request_id
            prompt = {"prompt_token_ids": list(prompt.token_ids)}
            if salt is not None:
                prompt["cache_salt"] = salt
        elif emit:
            params = params.clone()
            # Cached tokens are not computed, so they would have no rows.
            params.skip_reading_prefix_cache = True
            params.output_kind = RequestOutputKind.DELTA
            attach_request(params, StageRequest(request_id, emit=True))
        live = self._live[request_id] = _Live(constrained=is_constrained(params))
        try:
            live.internal_id = await self.llm.submit(
                request_id, prompt, params, self._collect, **kwargs
            )
        except BaseException:
            self._live.pop(request_id, None)
            raise
        if request_id not in self._live:
            # Aborted while its prompt was being processed.
            await self.llm.abort(live.internal_id, internal=True)

    def _row_params(
        self, request_id: str, prompt: RowPrompt, params: SamplingParams, emit: bool
    ) -> SamplingParams:
        params = params.clone()
        params.output_kind = RequestOutputKind.DELTA
        params.detokenize = False
        frames = frame_sampling(params)
        if frames.seed is None:
            # Drawn here, for all ranks of the stage.
            frames = msgspec.structs.replace(frames, seed=random.getrandbits(63))
        attach_request(params, StageRequest(request_id, emit, prompt.rows, frames, prompt.contents))
        return params

    async def update(self, updates: Sequence[tuple[str, StageInput]]) -> None:
        batch = []
        for request_id, rows in updates:
            assert isinstance(rows, RowInput)
            live = self._live.get(request_id)
            if live is None:
                for span in rows.spans:
                    self._connector.discard(span.handle)
            else:
                assert live.internal_id is not None, "an update before its submit"
                batch.append(RowUpdate(live.internal_id, rows))
        if batch:
            await self.llm.push_rows(batch)

    async def abort(self, request_ids: Sequence[str]) -> None:
        ids = []
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None and live.internal_id is not None:
                ids.append(live.internal_id)
        if ids:
            await self.llm.abort(ids, internal=True)

    async def outputs(self) -> list[StageOutput]:
        self._watch_core()
        while not self._step and self._failure is None:
            self._ready.clear()
            await self._ready.wait()
        if self._failure is not None:
            raise self._dead() from self._failure
        step, self._step = self._step, []
        return step

    async def check_health(self) -> None:
        if self._failure is not None or not (self.llm.core is None or self.llm.core.child.alive):
            raise self._dead()
        await self.llm.check_health()

    async def ping(self) -> None:
        await self.check_health()
        try:
            await self.llm.is_sleeping()
        except Exception as error:  # An engine core that is ending refuses, in vLLM's own words.
            raise self._dead() from error

    @property
    def load(self) -> int:
        return len(self._live)

    @property
    def capacity(self) -> int:
        return self.llm.vllm_config.scheduler_config.max_num_seqs

    @property
    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        llm = self.llm
        return {
            "add_lora": llm.add_lora,
            "remove_lora": llm.remove_lora,
            "list_loras": llm.list_loras,
            "pin_lora": llm.pin_lora,
            "collective_rpc": llm.collective_rpc,
            "reset_mm_cache": llm.reset_mm_cache,
            "reset_prefix_cache": llm.reset_prefix_cache,
            "reset_encoder_cache": llm.reset_encoder_cache,
            "get_supported_tasks": llm.get_supported_tasks,
            "is_sleeping": llm.is_sleeping,
            "sleep": llm.sleep,
            "wake_up": llm.wake_up,
            "start_profile": llm.start_profile,
            "stop_profile": llm.stop_profile,
            "is_tracing_enabled": llm.is_tracing_enabled,
            "do_log_stats": llm.do_log_stats,
        }

    def shutdown(self, timeout: float | None = None) -> None:
        if self._watched is not None and not self._watched.is_closed():
            self._watched.call_soon_threadsafe(self._core_ended)
        try:
            self.llm.shutdown(timeout)
        finally:
            self._connector.close()

    def _is_given_up(self, output: RequestOutput) -> bool:
        """Whether the engine core ended a request that nobody has aborted."""
        return output.finished and any(each.finish_reason == "abort" for each in output.outputs)

    async def _suspect(self) -> None:
        """Find out whether requests were given up because the engine core is ending.

        One that got SIGTERM aborts what it has, and only then takes seconds to end. One that was
        paused does so too, and lives.
        """
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                await self.ping()
        except (EngineDeadError, TimeoutError) as error:
            self._failed(error)
        else:
            self._step += [self._token_output(*each) for each in self._given_up]
        self._given_up.clear()
        self._suspicion = None
        self._ready.set()

    def _watch_core(self) -> None:
        """Have the loop notice the engine core's end at once."""
        if self.llm.core is not None and self._watched is None and self._failure is None:
            self._watched = asyncio.get_running_loop()
            self._watched.add_reader(self.llm.core.child.sentinel, self._core_ended)

    def _unwatch_core(self) -> None:
        if self._watched is not None and self.llm.core is not None:
            self._watched.remove_reader(self.llm.core.child.sentinel)
            self._watched = None

    def _failed(self, error: Exception) -> None:
        """Remember why, but not where: frames would keep this replica alive, and it them."""
        self._failure = self._failure or error.with_traceback(None)

    def _core_ended(self) -> None:
        self._unwatch_core()
        self._failed(self._dead())
        self._ready.set()

    def _dead(self) -> EngineDeadError:
        stage = ArStageConfig.of(self.llm.vllm_config).stage
        code = None if self.llm.core is None else self.llm.core.child.exit_code
        return EngineDeadError(
            f"the engine core of stage {stage!r} has ended"
            + ("" if code is None else f", exit code {code}")
        )

    def _collect(
        self, request_id: str, internal_id: str, output: RequestOutput | Exception
    ) -> None:
        """Called by the front end for each request of a step, in the loop's thread."""
        if isinstance(output, Exception):
            self._failed(output)
        elif (live := self._live.get(request_id)) is not None and self._is_given_up(output):
            self._given_up.append((request_id, internal_id, live, output))
            self._suspicion = self._suspicion or asyncio.ensure_future(self._suspect())
            return
        elif live is not None:
            self._step.append(self._token_output(request_id, internal_id, live, output))
        self._ready.set()

    def _token_output(
        self, request_id: str, internal_id: str, live: _Live, output: RequestOutput
    ) -> TokenOutput:
        completion = output.outputs[0]
        spans = self.llm.output_processor.take_spans(internal_id)
        prompt_token_ids = None if live.prompt_reported else output.prompt_token_ids
        live.prompt_reported = True
        shown_tokens = None
        if text := self.llm.output_processor.stoppable_text(internal_id):
            shown_tokens = live.shown.add(
                len(completion.token_ids),
                *text,
                cut=isinstance(completion.stop_reason, str),
                finished=output.finished,
            )
        if output.finished:
            self._live.pop(request_id, None)
        return TokenOutput(
            request_id=request_id,
            new_token_ids=list(completion.token_ids),
            prompt_token_ids=prompt_token_ids,
            shown_tokens=shown_tokens,
            spans=spans,
            finished=output.finished,
            finish_reason=completion.finish_reason,
            error=_error_of(output, spans, live),
            output=output,
        )


def _error_of(output: RequestOutput, spans: Sequence[RowSpan], live: _Live) -> ErrorInfo | None:
    """Why a request ends with this output, if it ends badly."""
    if live.constrained and is_stuck(output):
        return HOPELESS
    return NO_ROOM if any(span.lost for span in spans) else None
