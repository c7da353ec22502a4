# SPDX-License-Identifier: Apache-2.0
"""Starting every stage of a deployment, in an order that each platform allows."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_omni.ar.frontend import StageLLM
from vllm_omni.ar.launch import (
    engine_config,
    launch_replica,
    preload_model_class,
    prepare_platform,
)
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.wire import FrameSampling
from vllm_omni.config.plan import ConnectorSpec, DeploymentPlan, StagePlan
from vllm_omni.connectors.factory import create_connector
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.engine.engine import OmniEngine
from vllm_omni.engine.orchestrator import Topology
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.models.hf_overrides import stage_config_override
from vllm_omni.replica import StageReplica

logger = init_logger(__name__)

CLIENT = "client"
"""Name of the receiving end of what a final stage makes."""


@dataclass(frozen=True, slots=True)
class LaunchedPipeline:
    """A deployment whose stages run."""

    plan: DeploymentPlan
    engine: OmniEngine
    entry_llm: StageLLM

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything. Idempotent."""
        self.engine.shutdown(timeout)


def launch_pipeline(plan: DeploymentPlan) -> LaunchedPipeline:
    """Start every stage; if one fails, the ones that run are ended again.

    Raises:
        StageStartError: A stage did not come up.
    """
    prepare_platform()
    deployment_id = uuid.uuid4().hex[:12]
    with ExitStack() as undo:
        pools = []
        for stage in plan.stages:
            replicas = []
            for replica_id in range(stage.num_replicas):
                replica = _launch(plan, stage, replica_id, deployment_id)
                undo.callback(replica.shutdown, 0)
                replicas.append(replica)
            pools.append(StagePool(stage.stage, stage.stage_id, replicas))
        spec = _client_connector(plan)
        connector = create_connector(spec.name, spec.extra, deployment_id)
        engine = OmniEngine(_topology(plan), pools, connector)
        undo.pop_all()
    entry = pools[plan.pipeline.stage_id(plan.pipeline.entry.name)].replica(0)
    assert isinstance(entry, ArReplica)
    return LaunchedPipeline(plan, engine, entry.llm)
