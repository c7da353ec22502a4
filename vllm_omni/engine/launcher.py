# SPDX-License-Identifier: Apache-2.0
"""Starting every stage of a deployment."""

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from vllm_omni.ar.frontend import StageLLM
from vllm_omni.ar.launch import (
    ArLaunch,
    Told,
    engine_config,
    preload,
    prepare_platform,
)
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.config.ledger import Ledger
from vllm_omni.config.plan import ConnectorSpec, DeploymentPlan, StagePlan
from vllm_omni.config.secrets import redacted
from vllm_omni.config.weight_sizes import weight_bytes
from vllm_omni.connectors.factory import create_connector
from vllm_omni.connectors.segments import new_deployment_id, sweep, sweep_stale
from vllm_omni.diffusion.launch import DiffusionLaunch
from vllm_omni.diffusion.rules import GRAPH_LENGTHS
from vllm_omni.diffusion.spec import resolve_program
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.prefetch import prefetch
from vllm_omni.engine.sampling import route_defaults
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.engine.start_up import StageStartError, Start, StartUp, said_of
from vllm_omni.engine.topology import Topology
from vllm_omni.fork_server import fork_server
from vllm_omni.models.hf_overrides import talker_config
from vllm_omni.platforms import device_environment, device_memory, driver_in_use, environment
from vllm_omni.platforms.cuda.mps import CudaMps
from vllm_omni.replica import StageReplica, StartingReplica
from vllm_omni.start_report import Check, no_check
from vllm_omni.tracing import flush_tracing, start_tracing

logger = init_logger(__name__)

CLIENT = "client"
"""Name of the receiving end of what a final stage makes."""
BATCHES_TO_CHOOSE_FROM = 8
"""So many batches' worth of requests a diffusion stage that comes first takes at a time: it puts
them in order of what is left to do, which those that wait at the door are not."""


Launch = ArLaunch | DiffusionLaunch
"""How to start a replica of a stage, again and again if it must be."""


@dataclass(frozen=True, slots=True)
class LaunchedPipeline:
    """A deployment whose stages run.

    Attributes:
        entry_llm: vLLM's front end of the entry stage, which prepares prompts whatever becomes of
            its engine core; None if that is no language model.
        mps: What they share GPUs through.
        owner: The process that started them.
    """

    plan: DeploymentPlan
    engine: OmniEngine
    entry_llm: StageLLM | None
    deployment_id: str
    mps: CudaMps | None = None
    owner: int = field(default_factory=os.getpid)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything and leave nothing behind. Idempotent; nothing in a forked copy."""
        if os.getpid() != self.owner:
            return
        self.engine.shutdown(timeout)
        for pool in self.engine.pools:
            for launch in pool.launches:
                launch.close()
        if self.mps is not None:
            self.mps.close()
        if self.plan.traces_endpoint is not None:
            flush_tracing()
        sweep(self.deployment_id)


def launch_pipeline(plan: DeploymentPlan, check: Check = no_check) -> LaunchedPipeline:
    """Start every stage; if one fails, the ones that run are ended again.

    Args:
        plan: What to start.
        check: Called often meanwhile; what it raises ends the start.

    Raises:
        OmniConfigError: A stage's settings or the checkpoint are wrong, it cannot be fetched, or
            the devices have not the memory that the stages want.
        StageStartError: A stage did not come up, or all of them took too long; the time for
            downloads does not count.
    """
    logger.info(
        "Pipeline %s from %s, async_chunk %s",
        plan.pipeline.name,
        plan.deploy_source,
        plan.async_chunk,
    )
    _check_memory(plan)  # before a download, which the sizes of weights have to wait for
    prepare(plan)
    check()
    prefetch(plan, check)
    for line in _check_memory(plan):
        logger.info("Memory of %s", line)
    check = _within(plan.init_timeout, check)
    sweep_stale()
    deployment_id = new_deployment_id()
    with ExitStack() as undo:
        undo.callback(sweep, deployment_id)
        mps = _start_mps(plan, undo)
        shared = {} if mps is None else mps.environment
        launches = {
            stage.name: stage_launches(plan, stage, deployment_id, shared) for stage in plan.stages
        }
        pools = _start_all(plan, launches, check, undo)
        if plan.traces_endpoint is not None:
            start_tracing(plan.traces_endpoint, "orchestrator")
        spec = _client_connector(plan)
        connector = create_connector(spec.name, spec.extra, deployment_id)
        engine = OmniEngine(_topology(plan), pools, connector)
        undo.pop_all()
    entry = pools[plan.pipeline.stage_id(plan.pipeline.entry.name)].replica(0)
    llm = entry.llm if isinstance(entry, ArReplica) else None
    return LaunchedPipeline(plan, engine, llm, deployment_id, mps)


def _start_mps(plan: DeploymentPlan, undo: ExitStack) -> CudaMps | None:
    if not plan.cuda_mps:
        return None
    mps = CudaMps()
    undo.callback(mps.close)
    return mps


def _check_memory(plan: DeploymentPlan) -> list[str]:
    """Refuse what the devices have no room for; gives what each of them has, for the log."""
    source = device_memory(plan.platform)
    if source is None:
        return []
    ledger = Ledger.of(plan.stages, lambda stage: weight_bytes(plan.pipeline, stage))
    return list(ledger.check_memory(source))


def prepare(plan: DeploymentPlan) -> None:
    """Import what stages need, then start the process that forks them."""
    prepare_platform()
    stages = [stage.stage for stage in plan.stages]
    preload(
        [
            spec.arch if spec.row_driven else plan.pipeline.architectures[0]
            for spec in stages
            if spec.arch is not None
        ]
    )
    for spec in stages:
        if spec.program is not None:
            resolve_program(spec.program)
    fork_server(fresh=driver_in_use(plan.platform))


def _start_all(
    plan: DeploymentPlan, launches: dict[str, list[Launch]], check: Check, undo: ExitStack
) -> list[StagePool]:
    """Start every replica; see `StartUp` for the order."""

    def begin(start: Start) -> StartingReplica:
        stage = plan.stage(start.stage)
        logger.info(
            "Starting stage %s replica %d of %d on %s (%s)",
            stage.name,
            start.replica_id,
            stage.num_replicas,
            ",".join(stage.devices[start.replica_id]),
            _written(stage.engine_args),
        )
        undo.callback(start.launch.close)
        starting = start.launch.begin()
        undo.callback(starting.cancel)
        return starting

    replicas: dict[str, dict[int, StageReplica]] = {stage.name: {} for stage in plan.stages}
    starts = [
        Start(stage.name, replica_id, launch)
        for stage in plan.stages
        for replica_id, launch in enumerate(launches[stage.name])
    ]
    for start, replica in StartUp(starts, plan.stage_init_timeout, begin).run(check):
        undo.callback(replica.shutdown, 0)
        replicas[start.stage][start.replica_id] = replica
    return [
        StagePool(
            stage.stage,
            stage.stage_id,
            [replica for _, replica in sorted(replicas[stage.name].items())],
            launches[stage.name],
            stage.max_num_queued_reqs,
        )
        for stage in plan.stages
    ]


def _within(seconds: float, check: Check) -> Check:
    """A check that fails as well once all of the start has taken too long."""
    deadline = time.monotonic() + seconds

    def both() -> None:
        check()
        if time.monotonic() > deadline:
            raise StageStartError(
                f"the stages took longer to start than --init-timeout ({seconds:g} s)"
            )

    return both


def _written(settings: Mapping[str, Any]) -> str:
    """For the log."""
    return ", ".join(f"{key}={value}" for key, value in sorted(redacted(settings).items()))


def stage_launches(
    plan: DeploymentPlan,
    stage: StagePlan,
    deployment_id: str,
    shared: Mapping[str, str] | None = None,
) -> list[Launch]:
    """How to start each replica of a stage; `shared` are environment variables of all of them.

    Raises:
        StageStartError: vLLM takes the stage's settings not at all.
    """
    launches: list[Launch] = []
    for replica_id in range(stage.num_replicas):
        env = {**_stage_env(plan, stage, replica_id), **(shared or {})}
        if stage.diffusion is not None:
            launches.append(_diffusion_launch(plan, stage, replica_id, env, deployment_id))
            continue
        with said_of(stage.name, replica_id), environment(env):
            launches.append(_ar_launch(plan, stage, replica_id, deployment_id))
    return launches


def _ar_launch(
    plan: DeploymentPlan, stage: StagePlan, replica_id: int, deployment_id: str
) -> ArLaunch:
    place = _place(plan, stage, replica_id, deployment_id)
    overrides = talker_config if stage.stage.row_driven else None
    # vLLM's metrics carry the first of the names.
    names = list(plan.served_model_names)
    args = {"model": plan.model, "served_model_name": names, **stage.engine_args}
    # vLLM would start one exporter per engine, each in place of the last; ours is started once.
    args.pop("otlp_traces_endpoint", None)
    if stage is plan.entry:
        # The place where vLLM's own routes (completions, responses, ...) look for defaults.
        args["override_generation_config"] = {
            **args.get("override_generation_config", {}),
            **route_defaults(stage.default_sampling),
        }
    told = Told(
        metrics=not args.get("disable_log_stats", False),
        stats=plan.log_stats,
        traces=plan.traces_endpoint is not None,
    )
    return ArLaunch.of(
        engine_config(place, args, overrides),
        os.environ,
        told=told,
        timeout=plan.stage_init_timeout,
        devices=stage.accelerators(replica_id),
    )


def _diffusion_launch(
    plan: DeploymentPlan,
    stage: StagePlan,
    replica_id: int,
    env: Mapping[str, str],
    deployment_id: str,
) -> DiffusionLaunch:
    settings = stage.diffusion
    assert settings is not None and stage.stage.program is not None
    connector = next(iter(stage.input_connectors.values()), ConnectorSpec())
    sources = [edge.source for edge in plan.pipeline.edges if edge.target == stage.name]
    return DiffusionLaunch(
        program=stage.stage.program,
        settings=settings,
        stage=stage.name,
        source=sources[0] if sources else CLIENT,
        target=CLIENT,
        connector=connector.name,
        connector_extra=connector.extra,
        graph_lengths=connector.graph_lengths or GRAPH_LENGTHS,
        deployment_id=deployment_id,
        environment={**os.environ, **env},
        init_timeout=plan.stage_init_timeout,
        devices=stage.accelerators(replica_id),
        capacity=None if sources else BATCHES_TO_CHOOSE_FROM * settings.max_batch,
        log_requests=plan.log_requests,
        traces_endpoint=plan.traces_endpoint,
    )


def _place(
    plan: DeploymentPlan, stage: StagePlan, replica_id: int, deployment_id: str
) -> ArStageConfig:
    edges = plan.pipeline.edges
    source = next((edge.source for edge in edges if edge.target == stage.name), "")
    target = next((edge.target for edge in edges if edge.source == stage.name), "")
    link = (
        plan.connector(stage.name, target)
        if target
        else next(iter(stage.input_connectors.values()), ConnectorSpec())
    )
    return ArStageConfig(
        stage=stage.name,
        replica=replica_id,
        emits=_emits(plan, stage) if target else (),
        row_driven=stage.stage.row_driven,
        source=source,
        target=target,
        connector=link.name,
        connector_extra=dict(link.extra),
        deployment_id=deployment_id,
        log_requests=plan.log_requests,
    )


def _emits(plan: DeploymentPlan, stage: StagePlan) -> tuple[str, ...]:
    """The stage's row tensors, `hidden:accept` resolved to a layer number."""

    def resolve(name: str) -> str:
        if name != "hidden:accept":
            return name
        return f"hidden:{plan.hf_config.talker_config.accept_hidden_layer}"

    return tuple(resolve(name) for name in stage.stage.emits)


def _topology(plan: DeploymentPlan) -> Topology:
    return Topology(
        pipeline=plan.pipeline,
        model=plan.model,
        config=plan.hf_config,
        streaming=plan.async_chunk,
        edge_extra={
            (edge.source, edge.target): dict(plan.edge_extra(edge.source, edge.target))
            for edge in plan.pipeline.edges
        },
        reliability=plan.reliability,
        log_requests=plan.log_requests,
        tracing=plan.traces_endpoint is not None,
    )


def _client_connector(plan: DeploymentPlan) -> ConnectorSpec:
    """What the orchestrator reads final outputs from, and frees leftovers of every stage with."""
    for stage in reversed(plan.stages):
        for spec in stage.input_connectors.values():
            return spec
    return ConnectorSpec()


def _stage_env(plan: DeploymentPlan, stage: StagePlan, replica_id: int) -> dict[str, str]:
    env = dict(stage.env)
    if plan.platform == "cpu":
        # oneDNN keeps up to 1,024 compiled primitives, one per shape that ever came: memory grows
        # with the variety of requests. A step needs a few dozen.
        env.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
        env.setdefault("LRU_CACHE_CAPACITY", "32")
        # Every rank of every replica computes at the same time; together they get the cores once.
        ranks = sum(len(devices) for each in plan.stages for devices in each.devices)
        cores = len(os.sched_getaffinity(0))
        env.setdefault(
            "OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        )
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(plan.stage_init_timeout))
    return {**env, **device_environment(stage.devices[replica_id])}
