# SPDX-License-Identifier: Apache-2.0
"""A replica of a diffusion stage, from the orchestrator's side."""

import asyncio
import shutil
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.diffusion.messages import Abort, Inputs, Ping, ToWorker, decode_outputs, encode
from vllm_omni.diffusion.process import WorkerProcess
from vllm_omni.diffusion.worker import WorkerConfig
from vllm_omni.inputs import ProgramInput, StageInput
from vllm_omni.outputs import StageOutput
from vllm_omni.replica import StageReplica

SHUTDOWN_SECONDS = 5.0
"""Default patience for a process that is asked to end."""


class DiffusionReplica(StageReplica):
    """A process with a call-batching engine. Made by a `DiffusionLaunch`; used from one event loop.

    Args:
        process: The process; it is ready.
        config: What it was started with.
        capacity: See `DiffusionLaunch`.
    """

    def __init__(self, process: WorkerProcess, config: WorkerConfig, capacity: int) -> None:
        self._process = process
        self._address = config.address
        self._folder = config.folder
        self._stage = config.stage
        self._capacity = capacity
        self._live: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._died: asyncio.Future[None] | None = None
        self._received: asyncio.Future[bytes] | None = None
        self._heard = asyncio.Event()
        self._shutdown_lock = threading.Lock()
        self._shut_down = False

    @property
    def pid(self) -> int:
        """Process id of the replica."""
        return self._process.pid

    @property
    def load(self) -> int:
        """See `StageReplica`."""
        return len(self._live)

    @property
    def capacity(self) -> int:
        """See `StageReplica`."""
        return self._capacity

    async def submit(
        self, request_id: str, prompt: Any, params: Any, *, emit: bool = False, **kwargs: Any
    ) -> None:
        """See `StageReplica`.

        Args:
            request_id: See `StageReplica`.
            prompt: A `ProgramInput`. Its options go over those in `params`.
            params: `SamplingParams`, of which `seed` and `extra_args` become options, or a mapping
                of options, or None.
            emit: Ignored: what a program emits is what it makes.
            kwargs: `trace_headers` and `priority` are sent along; all else is ignored.
        """
        if not isinstance(prompt, ProgramInput):
            raise TypeError(f"stage {self._stage!r} takes a ProgramInput, not {type(prompt)}")
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} is already running")
        options = {**_options(params), **prompt.options}
        first = ProgramInput(
            options=options,
            spans=prompt.spans,
            windows=prompt.windows,
            final=prompt.final,
            trace=kwargs.get("trace_headers") or {},
            priority=kwargs.get("priority") or 0,
        )
        self._live.add(request_id)  # before the send: an output may be here before it returns
        try:
            await self._send(Inputs([(request_id, first)], first=True))
        except BaseException:
            self._live.discard(request_id)
            raise

    async def update(self, updates: Sequence[tuple[str, StageInput]]) -> None:
        """See `StageReplica`."""
        inputs = []
        for request_id, update in updates:
            if not isinstance(update, ProgramInput):
                raise TypeError(f"stage {self._stage!r} takes a ProgramInput, not {type(update)}")
            inputs.append((request_id, update))
        if inputs:
            await self._send(Inputs(inputs, first=False))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `StageReplica`."""
        self._live.difference_update(request_ids)
        if request_ids and self._process.alive:
            await self._send(Abort(list(request_ids)))

    async def outputs(self) -> list[StageOutput]:
        """See `StageReplica`."""
        socket, died = self._connect()
        while True:
            # Kept over a cancellation of this coroutine, so that no message is lost.
            received = self._received or asyncio.ensure_future(socket.recv())
            self._received = received
            await asyncio.wait((received, died), return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                raise self._dead()
            self._received = None
            self._heard.set()
            outputs = [o for o in decode_outputs(received.result()) if o.request_id in self._live]
            self._live.difference_update(o.request_id for o in outputs if o.finished)
            if outputs:
                return list(outputs)

    async def ping(self) -> None:
        """See `StageReplica`. Any message of the process is a sign of life."""
        self._heard.clear()
        await self._send(Ping())
        await self._heard.wait()

    async def check_health(self) -> None:
        """See `StageReplica`."""
        if not self._process.alive:
            raise self._dead()

    def shutdown(self, timeout: float | None = None) -> None:
        """See `StageReplica`."""
        with self._shutdown_lock:
            if self._shut_down:
                return
            self._shut_down = True
            if self._loop is not None and self._loop.is_running():
                self._loop.call_soon_threadsafe(self._on_death)
            self._process.stop(SHUTDOWN_SECONDS if timeout is None else timeout)
            shutil.rmtree(self._folder, ignore_errors=True)
        loop = self._loop
        if loop is None:
            return
        if loop.is_running():
            loop.call_soon_threadsafe(self._disconnect)
        else:
            self._disconnect()

    async def _send(self, message: ToWorker) -> None:
        if not self._process.alive:
            raise self._dead()
        socket, _ = self._connect()
        await socket.send(encode(message))

    def _connect(self) -> tuple[zmq.asyncio.Socket, asyncio.Future[None]]:
        """Set up the asyncio side on the running loop, once."""
        if self._shut_down:
            raise self._dead()
        if self._socket is None or self._died is None:
            loop = self._loop = asyncio.get_running_loop()
            died = self._died = loop.create_future()
            loop.add_reader(self._process.sentinel, self._on_death)
            self._context = zmq.asyncio.Context()
            self._socket = self._context.socket(zmq.PAIR)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.connect(self._address)
            return self._socket, died
        return self._socket, self._died

    def _on_death(self) -> None:
        assert self._loop is not None and self._died is not None
        if not self._died.done():
            # Once, and before it is closed: another file may have its number afterwards.
            self._loop.remove_reader(self._process.sentinel)
            self._died.set_result(None)

    def _disconnect(self) -> None:
        assert self._loop is not None and self._died is not None
        if not self._loop.is_closed():
            self._on_death()
            if self._received is not None:
                self._received.cancel()
        if self._context is not None:
            self._context.destroy(0)

    def _dead(self) -> EngineDeadError:
        if self._shut_down:
            return EngineDeadError(f"stage {self._stage!r} is shut down")
        return EngineDeadError(
            f"the process of stage {self._stage!r} has ended, exit code {self._process.exit_code}"
        )


def _options(params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if isinstance(params, SamplingParams):
        options = dict(params.extra_args or {})
        return options if params.seed is None else {"seed": params.seed, **options}
    if isinstance(params, Mapping):
        return dict(params)
    raise TypeError(f"parameters of a program are SamplingParams or a mapping, not {type(params)}")
