# SPDX-License-Identifier: Apache-2.0
"""A pipeline in this process: through `AsyncOmni`, and its stages' engines driven bare."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from vllm_omni import AsyncOmni
from vllm_omni.ar.replica import ArReplica
from vllm_omni.config.build import build_plan
from vllm_omni.config.pipeline import EdgeContext, EdgeState
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.connectors.factory import create_connector
from vllm_omni.connectors.segments import new_deployment_id, sweep
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.launcher import (
    LaunchedPipeline,
    _client_connector,
    _topology,
    prepare,
    stage_launches,
)
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.entrypoints.requests import RequestFactory
from vllm_omni.inputs import StageInput
from vllm_omni.outputs import ProgramOutput, StageOutput
from vllm_omni.replica import StageReplica

MODALITIES = ("text", "audio")


@dataclass(frozen=True)
class Lengths:
    """Tokens that every request makes, in each autoregressive stage."""

    thinker: int
    talker: int

    def params(self) -> tuple[SamplingParams, list[dict[str, Any] | None]]:
        """For `AsyncOmni.generate`: the thinker's, and the list by stage."""
        entry = SamplingParams(
            temperature=0,
            max_tokens=self.thinker,
            min_tokens=self.thinker,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        talker = {"temperature": 0, "max_tokens": self.talker, "min_tokens": self.talker}
        return entry, [None, talker, None]


@dataclass(frozen=True)
class Stages:
    """Running replicas of a deployment, one per stage, with nothing that drives them yet."""

    plan: DeploymentPlan
    replicas: dict[str, StageReplica]
    deployment_id: str

    @classmethod
    def start(cls, model: Path, **plan_options: Any) -> "Stages":
        """Start every stage, before any event loop or thread of this process runs."""
        plan = build_plan(str(model), **plan_options)
        prepare(plan)
        deployment_id = new_deployment_id()
        starting = {
            stage.name: stage_launches(plan, stage, deployment_id)[0].begin()
            for stage in plan.stages
        }
        replicas = {name: each.ready() for name, each in starting.items()}
        return cls(plan, replicas, deployment_id)

    def connector(self) -> Any:
        """One for whoever reads the final stage's output."""
        spec = _client_connector(self.plan)
        return create_connector(spec.name, spec.extra, self.deployment_id)

    def omni(self, engine_class: type[OmniEngine] = OmniEngine) -> AsyncOmni:
        """Hand the stages to an orchestrator. It owns them from now on."""
        pools = [
            StagePool(stage.stage, stage.stage_id, [self.replicas[stage.name]])
            for stage in self.plan.stages
        ]
        engine = engine_class(_topology(self.plan), pools, self.connector())
        entry = self.replicas[self.plan.entry.name]
        assert isinstance(entry, ArReplica)
        return AsyncOmni.of(LaunchedPipeline(self.plan, engine, entry.llm, self.deployment_id))


@dataclass
class _Flight:
    """A request on its way through the bare stages."""

    edges: dict[str, EdgeState]
    done: asyncio.Future[int]
    started: set[str] = field(default_factory=set)
    samples: int = 0


class BarePipeline:
    """The stages driven with the least that does the work.

    One coroutine per replica takes a step's outputs, feeds the family's edges and hands what they
    yield to the next replica, one message per step and target. No orchestrator, no thread, no
    queue, no message objects, no routing, no metrics, no clean-up, no failure handling. A linear
    pipeline whose last stage makes sound is assumed.

    Args:
        stages: Running replicas.
        lengths: Of all requests.
    """

    def __init__(self, stages: Stages, lengths: Lengths) -> None:
        self._stages = stages
        self._connector = stages.connector()
        self._flights: dict[str, _Flight] = {}
        entry, by_stage = lengths.params()
        submit = RequestFactory(stages.plan).make(
            None, "params", entry, by_stage, MODALITIES, None, 0.0, {}
        )
        self._params = dict(zip(stages.replicas, submit.params, strict=True))
        self._voice = submit.voice
        self._polls: list[asyncio.Task[None]] = []

    async def ask(self, prompt: Any) -> int:
        """Run one request; returns how many samples of sound it made."""
        if not self._polls:
            self._polls = [asyncio.create_task(self._poll(n)) for n in self._stages.replicas]
        request_id = uuid.uuid4().hex
        done = asyncio.get_running_loop().create_future()
        self._flights[request_id] = _Flight(self._edges(), done)
        entry = self._stages.plan.entry.name
        await self._stages.replicas[entry].submit(
            request_id, prompt, self._params[entry], emit=True
        )
        return await done

    def _edges(self) -> dict[str, EdgeState]:
        plan = self._stages.plan
        return {
            edge.source: edge.start(
                EdgeContext(
                    plan.model,
                    plan.hf_config,
                    self._voice,
                    plan.async_chunk,
                    plan.edge_extra(edge.source, edge.target),
                )
            )
            for edge in plan.pipeline.edges
        }

    async def _poll(self, stage: str) -> None:
        replica = self._stages.replicas[stage]
        targets = [edge.target for edge in self._stages.plan.pipeline.edges_from(stage)]
        while True:
            outputs = await replica.outputs()
            if targets:
                await self._pass_on(stage, targets[0], outputs)
            else:
                self._receive(outputs)

    async def _pass_on(self, stage: str, target: str, outputs: Sequence[StageOutput]) -> None:
        replica = self._stages.replicas[target]
        updates: list[tuple[str, StageInput]] = []
        starts: list[tuple[str, StageInput]] = []
        for output in outputs:
            flight = self._flights[output.request_id]
            stage_input = flight.edges[stage].feed(output)
            if stage_input is None:
                continue
            if target in flight.started:
                updates.append((output.request_id, stage_input))
            else:
                flight.started.add(target)
                starts.append((output.request_id, stage_input))
        # Starts first: several outputs of a request may come together.
        for request_id, stage_input in starts:
            await replica.submit(request_id, stage_input, self._params[target], emit=True)
        if updates:
            await replica.update(updates)

    def _receive(self, outputs: Sequence[StageOutput]) -> None:
        for output in outputs:
            assert isinstance(output, ProgramOutput) and output.error is None, output
            flight = self._flights[output.request_id]
            if output.payload is not None:
                payload = self._connector.get("", "client", output.payload.key, output.payload)
                flight.samples += payload["audio"].numel()
            if output.finished:
                del self._flights[output.request_id]
                flight.done.set_result(flight.samples)

    async def close(self) -> None:
        """End the stages."""
        for task in self._polls:
            task.cancel()
        await asyncio.gather(*self._polls, return_exceptions=True)
        for replica in self._stages.replicas.values():
            await asyncio.to_thread(replica.shutdown, 5)
        self._connector.close()
        sweep(self._stages.deployment_id)


class OmniPipeline:
    """The same through `AsyncOmni`.

    Args:
        omni: A running pipeline.
        lengths: Of all requests.
        on_output: Called with each output.
    """

    def __init__(
        self, omni: AsyncOmni, lengths: Lengths, on_output: Callable[[Any], None] | None = None
    ) -> None:
        self.omni = omni
        self._entry, self._by_stage = lengths.params()
        self._on_output = on_output
        self.steps: dict[str, list[float]] = defaultdict(list)
        """Seconds per token of each autoregressive stage, one entry per request."""

    async def ask(self, prompt: Any) -> int:
        """Run one request; returns how many samples of sound it made."""
        samples = 0
        async for output in self.omni.generate(
            prompt,
            self._entry,
            sampling_params_list=self._by_stage,
            output_modalities=MODALITIES,
        ):
            if self._on_output is not None:
                self._on_output(output)
            if output.audio is not None:
                samples += output.audio.samples.size
            for stage in output.stage_metrics:
                self._note_step(vars_of(stage))
        return samples

    def _note_step(self, stage: Mapping[str, Any]) -> None:
        if stage["tokens"] > 1:
            took = stage["finished_s"] - stage["first_output_s"]
            self.steps[stage["stage"]].append(took / (stage["tokens"] - 1))

    async def close(self) -> None:
        """End the stages."""
        await asyncio.to_thread(self.omni.shutdown, 5)


def vars_of(stage: Any) -> dict[str, Any]:
    """The fields of a slotted dataclass."""
    return {name: getattr(stage, name) for name in type(stage).__slots__}
