# SPDX-License-Identifier: Apache-2.0
"""Stages in memory, for faults that real engines cannot be brought to show on demand.

The pipeline is `think` (text) -> `talk` -> `sing` (audio). Its edges pass on one position per
output. What a replica gives, and when, a test says with `step`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import janus
import torch
from transformers import PretrainedConfig
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.config.pipeline import Edge, EdgeContext, EdgeState, Pipeline, Stage
from vllm_omni.config.plan import Reliability
from vllm_omni.connectors.base import make_key
from vllm_omni.connectors.segments import new_deployment_id
from vllm_omni.connectors.shm import SharedMemoryConnector
from vllm_omni.engine.messages import Abort, Command, Emit, ErrorMessage, Message, Shutdown, Submit
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.topology import Topology
from vllm_omni.handles import RowSpan, TensorHandle
from vllm_omni.inputs import ProgramInput, RowInput, RowPrompt, StageInput
from vllm_omni.outputs import ErrorInfo, ProgramOutput, StageOutput, TokenOutput
from vllm_omni.replica import StageReplica

WAIT_S = 5.0
RATE = 8000
FAULTY_TOKEN = 13
"""What no edge can pass on."""
DELTAS = SamplingParams(output_kind=RequestOutputKind.DELTA)


class EdgeFault(Exception):
    """What a faulty edge raises."""


@dataclass
class PassOn:
    """An edge that passes on one position per output."""

    program: bool
    started: bool = False

    def feed(self, output: StageOutput) -> StageInput | None:
        assert isinstance(output, TokenOutput)
        if FAULTY_TOKEN in output.new_token_ids:
            raise EdgeFault(f"token {FAULTY_TOKEN}")
        if self.program:
            self.started = True
            return ProgramInput(spans=list(output.spans), final=output.finished)
        rows = RowInput(spans=list(output.spans), index=[0], kinds=b"\0", final=output.finished)
        if self.started:
            return rows
        if not output.new_token_ids:
            return None
        self.started = True
        return RowPrompt(token_ids=[1], rows=rows)


def _talk(ctx: EdgeContext) -> EdgeState:
    if ctx.voice == "broken":
        raise EdgeFault("no such voice")
    return PassOn(program=False)


PIPELINE = Pipeline(
    name="fake",
    architectures=("Fake",),
    stages=(
        Stage("think", engine="ar", final_output="text", owns_tokenizer=True),
        Stage("talk", engine="ar", needs="audio", row_driven=True),
        Stage("sing", engine="diffusion", program="x:y", needs="audio", final_output="audio"),
    ),
    edges=(Edge("think", "talk", _talk), Edge("talk", "sing", lambda _: PassOn(program=True))),
)


class FakeReplica(StageReplica):
    """A stage replica in memory.

    Attributes:
        running: Prompts of the requests that it has.
        updates: The requests of each `update` call.
        aborted: Requests of all `abort` calls.
        dies_in: The method that raises `EngineDeadError` from now on.
        refuses: What `submit` raises.
        gate: `submit` waits for it.
        health: What `check_health` raises.
        hangs: `ping` is never answered.
        unstoppable: `shutdown` fails.
        offers: Its administrative operations.
        shutdowns: Timeouts of all `shutdown` calls.
    """

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}
        self.updates: list[list[str]] = []
        self.aborted: list[str] = []
        self.dies_in = ""
        self.refuses: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.health: Exception | None = None
        self.hangs = False
        self.unstoppable = False
        self.offers: dict[str, Callable[..., Awaitable[Any]]] = {}
        self.shutdowns: list[float | None] = []
        self._steps: asyncio.Queue[list[StageOutput]] = asyncio.Queue()

    def step(self, *outputs: StageOutput) -> None:
        """Give the outputs of one engine step."""
        for output in outputs:
            if output.finished:
                self.running.pop(output.request_id, None)
        self._steps.put_nowait(list(outputs))

    def _check(self, method: str) -> None:
        if self.dies_in == method:
            raise EngineDeadError(f"died in {method}")

    async def submit(self, request_id: str, prompt: Any, params: Any, **kwargs: Any) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self._check("submit")
        if self.refuses is not None:
            raise self.refuses
        self.running[request_id] = prompt

    async def update(self, updates: Sequence[tuple[str, StageInput]]) -> None:
        self._check("update")
        self.updates.append([request_id for request_id, _ in updates])

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)

    async def outputs(self) -> list[StageOutput]:
        outputs = await self._steps.get()
        self._check("outputs")
        return outputs

    async def check_health(self) -> None:
        self._check("check_health")
        if self.health is not None:
            raise self.health

    async def ping(self) -> None:
        self._check("ping")
        if self.hangs:
            await asyncio.Event().wait()

    @property
    def operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        return self.offers

    @property
    def capacity(self) -> int:
        return 8

    @property
    def load(self) -> int:
        return len(self.running)

    def shutdown(self, timeout: float | None = None) -> None:
        self.shutdowns.append(timeout)
        if self.unstoppable:
            raise OSError("will not end")


class FakeLaunch:
    """How to start a fake replica again.

    Attributes:
        failures: So many starts fail first.
        began: When each start began.
    """

    devices: tuple[str, ...] = ()
    link = None

    def __init__(self, replicas: list[FakeReplica], index: int, failures: int) -> None:
        self.failures = failures
        self.began: list[float] = []
        self._replicas = replicas
        self._index = index

    def begin(self) -> "FakeLaunch":
        self.began.append(monotonic())
        return self

    def ready(self, check: Callable[[], None] = lambda: None) -> FakeReplica:
        if len(self.began) <= self.failures:
            raise OSError("no room")
        self._replicas[self._index] = FakeReplica()
        return self._replicas[self._index]

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass

    def cancel(self) -> None:
        pass


def tokens(
    request_id: str, *ids: int, finished: bool = False, spans: Sequence[RowSpan] = ()
) -> TokenOutput:
    """One step's output of an AR stage."""
    text = "".join(f"<{each}>" for each in ids)
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=list(ids),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="stop" if finished else None,
    )
    return TokenOutput(
        request_id=request_id,
        new_token_ids=list(ids),
        prompt_token_ids=[1, 2],
        spans=tuple(spans),
        finished=finished,
        output=RequestOutput(request_id, None, [1, 2], None, [completion], finished),
    )


def sound(
    request_id: str,
    payload: TensorHandle | None = None,
    finished: bool = False,
    error: ErrorInfo | None = None,
) -> ProgramOutput:
    """One step's output of the audio stage."""
    return ProgramOutput(
        request_id=request_id,
        modality="audio",
        payload=payload,
        meta={"sample_rate": RATE},
        finished=finished or error is not None,
        error=error,
    )


@dataclass
class House:
    """An orchestrator that runs in the test's own loop, and its stages."""

    replicas: Mapping[str, list[FakeReplica]]
    launches: Mapping[str, list[FakeLaunch]]
    pools: Mapping[str, StagePool]
    connector: SharedMemoryConnector
    orchestrator: Orchestrator
    inbox: janus.Queue[Command]
    outbox: janus.Queue[list[Message]]
    task: asyncio.Task[None]
    _unread: list[Message] = field(default_factory=list)
    _serial: int = 0

    def replica(self, stage: str, index: int = 0) -> FakeReplica:
        return self.replicas[stage][index]

    def send(self, command: Command) -> None:
        self.inbox.sync_q.put_nowait(command)

    def submit(self, request_id: str, *modalities: str, voice: str | None = None) -> None:
        wanted = frozenset(modalities or ("text", "audio"))
        self.send(
            Submit(
                request_id=request_id,
                prompt="p",
                params=(DELTAS, DELTAS, None),
                modalities=wanted,
                voice=voice,
                arrival=monotonic(),
            )
        )

    def abort(self, *request_ids: str) -> None:
        self.send(Abort(request_ids))

    def payload(self, request_id: str, samples: int = 4) -> TensorHandle:
        """A stored sound."""
        self._serial += 1
        key = make_key(request_id, f"sing.{self._serial}")
        handle = self.connector.put("sing", "client", key, {"audio": torch.ones(samples)}).handle
        assert handle is not None
        return handle

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(200):
            await asyncio.sleep(0)

    async def outcome(self, request_id: str) -> list[Message]:
        """A request's messages up to its end."""
        own: list[Message] = []
        while True:
            told = [m for m in self._unread if isinstance(m, Emit | ErrorMessage)]
            own += [message for message in told if message.request_id == request_id]
            self._unread = [m for m in told if m.request_id != request_id]
            if own and (isinstance(own[-1], ErrorMessage) or own[-1].last):
                return own
            self._unread += await asyncio.wait_for(self.outbox.async_q.get(), WAIT_S)

    async def failure(self, request_id: str) -> BaseException:
        """What a request's caller would see raised."""
        message = (await self.outcome(request_id))[-1]
        assert isinstance(message, ErrorMessage), message
        return message.to_exception()

    async def served(self, request_id: str, *modalities: str) -> list[Message]:
        """Run a request through and return its messages; it must end well."""
        self.submit(request_id, *modalities)
        await self.settle()
        self.at("think", request_id).step(tokens(request_id, 1, finished=True))
        if "audio" in modalities:
            await self.settle()
            self.at("talk", request_id).step(tokens(request_id, 7, finished=True))
            await self.settle()
            self.at("sing", request_id).step(sound(request_id, self.payload(request_id), True))
        messages = await self.outcome(request_id)
        assert all(isinstance(message, Emit) for message in messages), messages
        return messages

    def at(self, stage: str, request_id: str) -> FakeReplica:
        """The replica that has a request."""
        return next(r for r in self.replicas[stage] if request_id in r.running)

    async def assert_empty(self) -> None:
        """Nothing is left of any request, here or in a stage."""
        await self.settle()
        assert self.orchestrator._states == {}
        for name, pool in self.pools.items():
            assert pool._bound == {}, name
            for replica_id in pool.live_replica_ids:
                assert self.replica(name, replica_id).running == {}, name


@asynccontextmanager
async def house(
    reliability: Reliability | None = None, failed_starts: int = 0, **counts: int
) -> AsyncIterator[House]:
    """A running orchestrator over fakes; `think=2` makes two replicas of that stage.

    Args:
        reliability: By default dead replicas stay dead and requests are not tried again.
        failed_starts: How many starts of a dead replica fail before one goes well.
        counts: Replicas of each stage.
    """
    replicas = {s.name: [FakeReplica() for _ in range(counts.get(s.name, 1))] for s in STAGES}
    launches = {
        name: [FakeLaunch(made, i, failed_starts) for i in range(len(made))]
        for name, made in replicas.items()
    }
    pools = {
        s.name: StagePool(s, i, replicas[s.name], launches[s.name]) for i, s in enumerate(STAGES)
    }
    connector = SharedMemoryConnector(new_deployment_id())
    inbox: janus.Queue[Command] = janus.Queue()
    outbox: janus.Queue[list[Message]] = janus.Queue()
    topology = Topology(
        PIPELINE,
        "fake",
        PretrainedConfig(),
        streaming=True,
        edge_extra={},
        reliability=reliability or Reliability(max_respawns=0, retry_requests=False),
    )
    orchestrator = Orchestrator(
        topology, list(pools.values()), connector, inbox.async_q, outbox.sync_q
    )
    task = asyncio.create_task(orchestrator.run())
    made = House(replicas, launches, pools, connector, orchestrator, inbox, outbox, task)
    try:
        yield made
    finally:
        made.send(Shutdown(0))
        await asyncio.wait_for(task, WAIT_S)
        connector.close()
        await inbox.aclose()
        await outbox.aclose()


STAGES = PIPELINE.stages
