# SPDX-License-Identifier: Apache-2.0
"""What an orchestrator is made for."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.plan import Reliability


@dataclass(frozen=True, slots=True)
class Topology:
    """The pipeline as it is deployed.

    Attributes:
        pipeline: Stages and edges.
        model: Folder or hub name of the checkpoint.
        config: The checkpoint's Hugging Face config.
        streaming: `async_chunk`.
        edge_extra: The connector's `extra` of each edge, by (source, target).
        reliability: What is done about replicas that die.
        log_requests: Log when a request enters and leaves a stage.
        tracing: Make spans.
    """

    pipeline: Pipeline
    model: str
    config: PretrainedConfig
    streaming: bool
    edge_extra: dict[tuple[str, str], dict[str, Any]]
    reliability: Reliability = field(default_factory=Reliability)
    log_requests: bool = False
    tracing: bool = False
