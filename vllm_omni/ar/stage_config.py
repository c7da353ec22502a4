# SPDX-License-Identifier: Apache-2.0
"""What an AR stage's processes know about their place in the pipeline.

It travels as `additional_config["omni"]` of the stage's vLLM config, so it reaches the scheduler
and every worker, and is part of vLLM's config hash.
"""

from typing import Any

import msgspec
from vllm.config import VllmConfig

from vllm_omni.ar.wire import OMNI_KEY


class ArStageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Place and duties of an AR stage.

    Attributes:
        stage: Its name.
        replica: Which copy of it this is.
        emits: Row tensors it emits for requests that want them; `hidden:accept` is resolved.
        row_driven: Its inputs are rows of the stage `source`.
        source: Name of the upstream stage, for a row-driven stage.
        target: Name of the downstream stage that takes its rows.
        connector: Registry name of the connector.
        connector_extra: The connector's own options.
        deployment_id: Names the deployment in shared memory.
        log_requests: Say in the log when a request comes and goes (else only when debugging).
    """

    stage: str
    replica: int = 0
    emits: tuple[str, ...] = ()
    row_driven: bool = False
    source: str = ""
    target: str = ""
    connector: str = "SharedMemoryConnector"
    connector_extra: dict[str, Any] = {}
    deployment_id: str = ""
    log_requests: bool = False

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "ArStageConfig":
        """The stage config inside of a vLLM config."""
        return msgspec.convert(vllm_config.additional_config[OMNI_KEY], cls)

    def to_additional_config(self) -> dict[str, Any]:
        """As `additional_config` for `AsyncEngineArgs`."""
        return {OMNI_KEY: msgspec.to_builtins(self)}

    @property
    def hidden_layer(self) -> int | None:
        """N of `hidden:N`, if emitted."""
        for name in self.emits:
            head, _, layer = name.partition(":")
            if head == "hidden" and layer:
                return int(layer)
        return None
