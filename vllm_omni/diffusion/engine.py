# SPDX-License-Identifier: Apache-2.0
"""The call-batching engine (DESIGN.md section 7).

Each request is a program in a greenlet of its own. A program that calls a component parks; the
engine runs parked calls that can run together in one forward and hands each program its slice.
"""

import inspect
import logging
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from greenlet import GreenletExit

from vllm_omni.diffusion.calls import Batch, Call
from vllm_omni.diffusion.collate import CollationError, Collator, function_of, iter_tensors
from vllm_omni.diffusion.failures import check_finite, error_info, is_out_of_memory
from vllm_omni.diffusion.foresight import Foresight
from vllm_omni.diffusion.program import (
    Message,
    Program,
    ProgramGreenlet,
    Receive,
    ServedComponent,
    call_component,
)
from vllm_omni.diffusion.proxy import make_proxy
from vllm_omni.diffusion.ranks.ranks import Ranks
from vllm_omni.diffusion.scheduler import CallScheduler
from vllm_omni.diffusion.spec import Component, Loaded, ProgramSpec
from vllm_omni.diffusion.stopwatch import stopwatch_for
from vllm_omni.errors import OmniClientError, OverloadedError
from vllm_omni.outputs import ErrorInfo

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Emission:
    """What a step gives for one request; a `ProgramOutput` with the tensors in hand."""

    request_id: str
    modality: str
    tensors: Mapping[str, torch.Tensor] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has not ended."""

    program: Program
    greenlet: ProgramGreenlet
    foresight: Foresight = field(default_factory=Foresight)
    call: Call | None = None
    receiving: bool = False
    result: Any = None
    error: BaseException | None = None


class Engine:
    """Runs programs of one kind. All methods must be called from one thread.

    Args:
        spec: The program.
        loaded: Its components and assets.
        device: Where the components are.
        max_batch: Most calls per forward.
        max_requests: Most live requests; further ones are refused.
        scheduler: What decides which calls run next; with its own `max_batch`.
        foresee: Run calls that are still to come together with those that they follow.
        graphs: Lengths for which CUDA graphs are captured, of the methods that have rules for them.
        ranks: Other processes, which run the forwards of components together with this one.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        loaded: Loaded,
        *,
        device: torch.device | None = None,
        max_batch: int = 32,
        max_requests: int = 256,
        scheduler: CallScheduler | None = None,
        foresee: bool = True,
        graphs: Sequence[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._spec = spec
        self._device = _indexed(device or torch.device("cpu"))
        self._max_requests = max_requests
        self._foresees = foresee
        self._assets = loaded.assets
        self._components = {
            name: _serve(name, part, ranks) for name, part in loaded.components.items()
        }
        if graphs:
            for component in self._components.values():
                for collator in component.collators.values():
                    collator.capture(graphs)
        self._scheduler = CallScheduler(max_batch) if scheduler is None else scheduler
        self._stopwatch = stopwatch_for(self._device)
        self._live: dict[str, _Live] = {}
        self._runnable: deque[_Live] = deque()
        self._emissions: list[Emission] = []
        self.forward_sizes: dict[int, int] = {}
        """How many forwards have run with how many calls."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._runnable or self._emissions or len(self._scheduler))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request_id: str, first: Message) -> None:
        """Start a request. What is wrong with it comes out as its output.

        Raises:
            ValueError: A request of that id is live.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} is already running")
        if len(self._live) >= self._max_requests:
            message = f"{self._spec.name} is busy: {self._max_requests} requests are running"
            self._end(request_id, error_info(OverloadedError(message), self._spec.name))
            return
        try:
            seed = _seed(first.options.get("seed"), self._spec.default_seed)
        except OmniClientError as error:
            self._end(request_id, error_info(error, self._spec.name))
            return
        program = Program(
            request_id,
            first,
            seed,
            self._device,
            self._components,
            self._assets,
            self._scheduler.begin_job(first.priority),
            self._emit,
        )
        greenlet = ProgramGreenlet(lambda _: self._spec.run(program))
        greenlet.program = program
        live = self._live[request_id] = _Live(program, greenlet)
        self._runnable.append(live)

    def receive(self, request_id: str, message: Message) -> None:
        """Give a running request its next message; ignored if it has ended."""
        live = self._live.get(request_id)
        if live is None:
            return
        live.program.inbox.append(message)
        if live.receiving:
            live.receiving = False
            live.program.job = self._scheduler.begin_job(live.program.job.priority)
            self._runnable.append(live)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without further output; unknown ids are ignored."""
        aborted = {id for id in request_ids if id in self._live}
        for request_id in aborted:
            live = self._live.pop(request_id)
            live.program.aborted = True
            if live.call is not None:
                self._scheduler.discard(live.call)
                live.call = None
            if live in self._runnable:
                self._runnable.remove(live)
            live.result, live.error = None, GreenletExit()
            try:
                self._switch(live)
            except Exception as error:
                # What a dying program raises concerns nobody any more, but should be known.
                self._log(live, error)
            if not live.greenlet.dead:
                logger.error("Program of request %s went on after its abort", request_id)
        if aborted:
            self._emissions = [e for e in self._emissions if e.request_id not in aborted]

    def fail(self, request_id: str, error: ErrorInfo) -> None:
        """End a request by an error from outside of its program; it need not be live."""
        self.abort([request_id])
        self._end(request_id, error)

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """Run every program that can run, then one forward, then the programs it concerned.

        Returns what the programs emitted; tensors are on whatever device the program left them.
        """
        self._run_programs()
        for batch, seconds in self._stopwatch.results():
            self._scheduler.ran(batch, seconds)
        if calls := self._scheduler.select():
            more = self._scheduler.company(calls, self._foresee) if self._foresees else []
            self._run_calls([*calls, *more])
            self._run_programs()
        emissions, self._emissions = self._emissions, []
        return emissions

    def _run_programs(self) -> None:
        while self._runnable:
            live = self._runnable.popleft()
            try:
                request = self._switch(live)
            except Exception as error:
                # The one place that keeps a program's failure to the program, whatever it is.
                self._fail(live, error)
                continue
            if live.greenlet.dead:
                self._scheduler.end_job(live.program.job)
                self._end(live.program.request_id)
            elif isinstance(request, Call):
                self._park(live, request)
            else:
                assert isinstance(request, Receive)
                self._scheduler.end_job(live.program.job)
                live.receiving = True
                live.foresight = Foresight()

    def _switch(self, live: _Live) -> Any:
        """Let a program go on to its next request to the engine, or to its end."""
        result, error = live.result, live.error
        live.result = live.error = None
        live.program.state.resume()
        try:
            return live.greenlet.switch(result) if error is None else live.greenlet.throw(error)
        finally:
            live.program.state.park()
            del error  # its traceback leads to this frame

    def _park(self, live: _Live, call: Call) -> None:
        call.autocast = live.program.state.autocast
        try:
            kept = live.foresight.met(call) if self._foresees else None
            if kept is None:
                _describe(call)
        except Exception as error:
            # Arguments that cannot even be described are the program's failure.
            self._resume(live, error=error)
            return
        if kept is None:
            live.call = call
            self._scheduler.add(call)
        else:
            call.job.count(call.collator)
            self._resume(live, kept.result)

    def _foresee(self, call: Call) -> Call | None:
        """What will follow a call and can run together with it."""
        foresight = self._live[call.program.request_id].foresight
        foreseen = foresight.foresee(call)
        if foreseen is None:
            return None
        try:
            _describe(foreseen)
        except Exception as error:
            # It is a guess: what is wrong with it is nobody's failure.
            logger.debug("%s: a call was foreseen wrongly: %s", self._spec.name, error)
        else:
            if foreseen.group == call.group:
                return foreseen
        foresight.give_up(call.collator)
        return None

    def _run_calls(self, calls: list[Call]) -> None:
        """Run calls in one forward; if that fails, in smaller ones: only the culprit is to fail."""
        self.forward_sizes[len(calls)] = self.forward_sizes.get(len(calls), 0) + 1
        try:
            with self._stopwatch.timing(Batch.of(calls)):
                results = calls[0].collator.run(calls)
        except Exception as error:
            # Whose failure it is shows when the calls run apart.
            if len(calls) == 1:
                self._resume(self._live[calls[0].program.request_id], error=error)
                return
            parts = self._apart(calls, error)
        else:
            for call, result in zip(calls, results, strict=True):
                live = self._live[call.program.request_id]
                if live.call is call:
                    self._resume(live, result)
                else:
                    live.foresight.keep(call, result)
            return
        for part in parts:  # with nothing left of the failure: its traceback holds tensors
            self._run_calls(part)

    def _apart(self, calls: list[Call], error: Exception) -> list[list[Call]]:
        """How to run calls that failed together; first of all without those that are foreseen."""
        made = self._without_foreseen(calls)
        if is_out_of_memory(error):
            logger.warning("%s: no memory for a batch of %d calls", self._spec.name, len(calls))
            self._scheduler.ran_out_of_memory(Batch.of(calls))
            middle = len(calls) // 2
            return [made] if len(made) < len(calls) else [calls[:middle], calls[middle:]]
        if isinstance(error, CollationError):
            logger.warning("%s runs unbatched from now on: %s", self._spec.name, error)
            calls[0].collator.max_batch = 1
        elif len(made) < len(calls):
            return [made]
        return [[call] for call in made]

    def _without_foreseen(self, calls: list[Call]) -> list[Call]:
        """The calls that programs have made; of programs of the others no more is foreseen."""
        made = []
        for call in calls:
            live = self._live[call.program.request_id]
            if live.call is call:
                made.append(call)
            else:
                live.foresight.give_up(call.collator)
        return made

    def _resume(self, live: _Live, result: Any = None, error: Exception | None = None) -> None:
        live.call, live.result, live.error = None, result, error
        self._runnable.append(live)

    def _fail(self, live: _Live, error: Exception) -> None:
        request_id = live.program.request_id
        if not isinstance(error, OmniClientError):
            self._log(live, error)
        self._end(request_id, error_info(error, self._spec.name))

    def _log(self, live: _Live, error: Exception) -> None:
        # As text: a log record that holds the traceback would keep the program's locals alive.
        text = "".join(traceback.format_exception(error))
        request_id = live.program.request_id
        logger.error("%s failed for request %s:\n%s", self._spec.name, request_id, text)

    def _end(self, request_id: str, error: ErrorInfo | None = None) -> None:
        """Forget a request and mark its last emission of this step as its last, or add one."""
        self._live.pop(request_id, None)
        last = next((e for e in reversed(self._emissions) if e.request_id == request_id), None)
        if last is None or error is not None:
            last = Emission(request_id, self._spec.modality)
            self._emissions.append(last)
        last.finished, last.error = True, error

    def _emit(
        self,
        program: Program,
        modality: str,
        tensors: Mapping[str, torch.Tensor] | None,
        meta: Mapping[str, Any],
    ) -> None:
        if not program.aborted:
            check_finite(tensors or {})
            self._emissions.append(Emission(program.request_id, modality, tensors, meta))


def _indexed(device: torch.device) -> torch.device:
    """The device by its number: torch would look the number up at every switch."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _describe(call: Call) -> None:
    """Fill in what the call's arguments say about it."""
    call.collator.describe(call)
    tensors = (*iter_tensors(call.args), *iter_tensors(call.kwargs))
    call.work = max(1, sum(tensor.numel() for tensor in tensors))


def _serve(name: str, component: Component, ranks: Ranks | None) -> ServedComponent:
    module = component.module
    tensors = chain(module.parameters(), module.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    collators = {}
    inline = [method for method, rules in component.methods.items() if rules.inline]
    for method, rules in component.methods.items():
        if rules.inline:
            continue
        function = function_of(module, method)
        parameters = inspect.signature(module.forward if method == "forward" else function)
        spread = ranks.method(name, method) if ranks is not None and component.spread else None
        collators[method] = Collator(
            function, parameters, rules, device, component.within, method, spread
        )

    def park(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_component(name, collators[method], args, kwargs)

    return ServedComponent(make_proxy(module, collators, park, inline), collators)


def _seed(value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise OmniClientError(
            f"seed must be an integer from 0 to 2**63 - 1, got {value!r}", param="seed"
        )
    return value
