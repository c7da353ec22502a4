# SPDX-License-Identifier: Apache-2.0
"""The loop of a replica's process: messages in, engine steps, one message of outputs per step."""

import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.connectors.base import OmniConnector, make_key
from vllm_omni.connectors.factory import create_connector
from vllm_omni.diffusion.engine import Emission, Engine
from vllm_omni.diffusion.messages import Abort, Ping, decode_to_worker, encode
from vllm_omni.diffusion.program import Message
from vllm_omni.diffusion.ranks.layout import Layout
from vllm_omni.diffusion.ranks.process import RankConfig
from vllm_omni.diffusion.ranks.ranks import Ranks
from vllm_omni.diffusion.request_watch import RequestWatch
from vllm_omni.diffusion.spec import load_context, resolve_program
from vllm_omni.errors import OmniConfigError
from vllm_omni.handles import RowSpan
from vllm_omni.inputs import ProgramInput
from vllm_omni.outputs import NO_ROOM, ErrorInfo, ProgramOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a replica's process is started with.

    Attributes:
        program: Dotted path of the program.
        settings: The stage's settings.
        stage: Name of the stage.
        source: Stage whose payloads it reads.
        target: Stage that its own payloads are for.
        connector: Registry name of the connector.
        connector_extra: The connector's own options.
        graph_lengths: Frames that decoders have CUDA graphs for.
        deployment_id: Common to all processes of the deployment.
        max_requests: Most live requests.
        log_requests: Say in the log when a request comes and goes (else only when debugging).
        traces_endpoint: Where to send spans, if to anywhere.
        folder: Temporary folder of the socket file.
    """

    program: str
    settings: DiffusionStageConfig
    stage: str
    source: str
    target: str
    connector: str
    connector_extra: dict[str, Any] = field(default_factory=dict)
    graph_lengths: tuple[int, ...]
    deployment_id: str | None
    max_requests: int
    log_requests: bool = False
    traces_endpoint: str | None = None
    folder: str

    @property
    def address(self) -> str:
        """ZMQ address that the process binds and its client connects to."""
        return f"ipc://{self.folder}/socket"


def start_ranks(config: WorkerConfig) -> Ranks | None:
    """Start the replica's other ranks, if it has any. Before this process uses its device.

    Raises:
        OmniConfigError: The program or the checkpoint cannot run on several devices so.
    """
    settings = config.settings
    layout = Layout.of(settings)
    if layout.world_size == 1:
        return None
    spread = resolve_program(config.program).spread
    if spread is None:
        raise OmniConfigError(
            f"program {config.program!r} runs on one device only: tensor_parallel_size, "
            "ulysses_degree and cfg_parallel_size must be 1"
        )
    spread.check(load_context(settings, torch.device(settings.device)))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // layout.world_size))
    logger.info("Stage %s runs on %d ranks: %s", config.stage, layout.world_size, layout)
    ranks = RankConfig(config.program, settings, config.stage, config.folder, layout)
    return Ranks(ranks, settings.device)


class Worker:
    """Loads the program's components and serves one client.

    Args:
        config: What to serve.
        ranks: The replica's other ranks, by `start_ranks`; ended with it.

    Raises:
        OmniConfigError: The program, a setting or the checkpoint is wrong.
    """

    def __init__(self, config: WorkerConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        settings = config.settings
        spec = resolve_program(config.program)
        device = torch.device(settings.device)
        group = None if ranks is None else ranks.join()
        with torch.inference_mode():
            loaded = spec.load(load_context(settings, device, group))
        if ranks is not None:
            ranks.wait_until_ready()
        self._modality = spec.modality
        self._engine = Engine(
            spec,
            loaded,
            device=device,
            max_batch=max(settings.max_batch, settings.cfg_parallel_size),
            max_requests=config.max_requests,
            graphs=() if settings.enforce_eager else config.graph_lengths,
            ranks=ranks,
        )
        self._ranks = ranks
        self._connector: OmniConnector = create_connector(
            config.connector, config.connector_extra, config.deployment_id
        )
        self._watch = RequestWatch(config.stage, config.log_requests)
        self._serial = itertools.count()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # What is in flight is bounded by the number of live requests.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(config.address)
        # The components stay; the collector need not look at them again.
        gc.collect()
        gc.freeze()

    def run(self, stop: Sequence[int]) -> None:
        """Serve until one of the file descriptors `stop` becomes readable."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in stop:
            poller.register(descriptor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._engine.has_work else None))
            if not ready.keys().isdisjoint(stop):
                return
            if self._socket in ready:
                self._take_messages()
            if self._engine.has_work and (outputs := self._outputs(self._engine.step())):
                self._send(outputs)

    def close(self) -> None:
        """Free what this process holds outside of itself."""
        self._socket.close(0)
        self._context.term()
        self._connector.close()
        if self._ranks is not None:
            self._ranks.close()

    def _send(self, outputs: list[Any]) -> None:
        """Send, if there still is who takes it: else a send would wait for ever, and the server's
        end, of which `run` hears, would not be this process's."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(outputs), zmq.NOBLOCK)

    def _take_messages(self) -> None:
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_to_worker(frame)
            if isinstance(message, Abort):
                self._abort(message.request_ids)
                continue
            if isinstance(message, Ping):
                self._send([])
                continue
            for request_id, program_input in message.inputs:
                self._take_input(request_id, program_input, message.first)

    def _take_input(self, request_id: str, program_input: ProgramInput, first: bool) -> None:
        if not first and request_id not in self._engine:
            for span in program_input.spans:
                self._connector.discard(span.handle)
            return
        try:
            message = self._read(request_id, program_input)
        except (KeyError, ValueError) as error:
            # Released meanwhile, or damaged.
            logger.error("Input of request %s cannot be read: %s", request_id, error)
            info = ErrorInfo(message=f"{self._config.stage} failed: its input is gone")
            self._engine.fail(request_id, info)
            return
        if first:
            self._watch.begin(request_id, program_input.trace)
            self._engine.add(request_id, message)
        else:
            self._engine.receive(request_id, message)

    def _read(self, request_id: str, program_input: ProgramInput) -> Message:
        spans = program_input.spans
        began = time.monotonic()
        parts = [self._get(span) for span in spans]
        self._watch.read(request_id, time.monotonic() - began)
        tensors = parts[0] if len(parts) == 1 else _join(parts)
        return Message(
            options=program_input.options,
            tensors=tensors,
            start=spans[0].start if spans else 0,
            windows=tuple(program_input.windows),
            final=program_input.final,
            priority=program_input.priority,
        )

    def _get(self, span: RowSpan) -> dict[str, torch.Tensor]:
        config = self._config
        return self._connector.get(config.source, config.stage, span.handle.key, span.handle)

    def _abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._watch.end(request_id, "aborted")
            self._connector.cleanup(request_id)

    def _outputs(self, emissions: Iterable[Emission]) -> list[ProgramOutput]:
        outputs = []
        full: set[str] = set()
        for emission in emissions:
            if emission.request_id in full:
                continue
            output = self._output(emission)
            if output.error is not None and not emission.finished:
                full.add(emission.request_id)
                self._engine.abort([emission.request_id])
            outputs.append(output)
        return outputs

    def _output(self, emission: Emission) -> ProgramOutput:
        config = self._config
        request_id, handle, error = emission.request_id, None, emission.error
        if emission.tensors is not None:
            key = make_key(request_id, f"{config.stage}.{next(self._serial)}")
            put = self._connector.put(config.stage, config.target, key, emission.tensors)
            handle = put.handle
            if not put.ok:
                logger.warning("Request %s: no room for %d bytes of output", request_id, put.size)
                error = NO_ROOM
        finished = emission.finished or error is not None
        get_s = self._watch.read_s(request_id)
        if finished:
            self._watch.end(request_id, "ended" if error is None else error.message)
        return ProgramOutput(
            request_id=request_id,
            modality=emission.modality,
            payload=handle,
            meta=dict(emission.meta),
            finished=finished,
            error=error,
            get_s=get_s,
        )


def _join(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of one name in a row; not every part has every name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}
