# SPDX-License-Identifier: Apache-2.0
"""Starting a replica of a diffusion stage."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from vllm_omni.config.plan import DiffusionStageConfig
from vllm_omni.diffusion.client import DiffusionReplica
from vllm_omni.diffusion.process import WorkerProcess
from vllm_omni.diffusion.rules import GRAPH_LENGTHS
from vllm_omni.diffusion.worker import WorkerConfig
from vllm_omni.start_report import Check, no_check


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionLaunch:
    """How to start a replica, as often as it has to be.

    Attributes:
        program: `module:name` of a `ProgramSpec`.
        settings: Model, device, batching.
        stage: Name of the stage.
        source: Stage whose payloads it reads.
        target: Stage that its own payloads are for.
        connector: Registry name of the connector.
        connector_extra: The connector's options.
        graph_lengths: Frames that decoders have CUDA graphs for.
        deployment_id: Common to all processes of the deployment.
        environment: Of its process; None for this process's own.
        init_timeout: Seconds that it may take to be ready.
        devices: Accelerators that it runs on, as the plan numbers them.
        max_requests: Most live requests; further ones fail at once.
        capacity: Requests that are sent to it before others wait at the door; None for as many as
            fit into one batch.
        log_requests: Say in the log when a request comes and goes.
        traces_endpoint: Where its process sends spans, if to anywhere.
    """

    program: str
    settings: DiffusionStageConfig
    stage: str
    source: str
    target: str = "client"
    connector: str = "SharedMemoryConnector"
    connector_extra: Mapping[str, Any] = field(default_factory=dict)
    graph_lengths: tuple[int, ...] = GRAPH_LENGTHS
    deployment_id: str | None = None
    environment: Mapping[str, str] | None = None
    init_timeout: float = 300.0
    devices: tuple[str, ...] = ()
    max_requests: int = 4096
    capacity: int | None = None
    log_requests: bool = False
    traces_endpoint: str | None = None

    def begin(self) -> "StartingDiffusionReplica":
        """Start the process, without waiting for it.

        Raises:
            ForkServerGoneError: There is nobody to fork it.
        """
        config = WorkerConfig(
            program=self.program,
            settings=self.settings,
            stage=self.stage,
            source=self.source,
            target=self.target,
            connector=self.connector,
            connector_extra=dict(self.connector_extra),
            graph_lengths=self.graph_lengths,
            deployment_id=self.deployment_id,
            max_requests=self.max_requests,
            log_requests=self.log_requests,
            traces_endpoint=self.traces_endpoint,
            folder=tempfile.mkdtemp(prefix="vllm-omni-"),
        )
        environment = os.environ if self.environment is None else self.environment
        try:
            process = WorkerProcess(config, environment)
        except BaseException:
            shutil.rmtree(config.folder)
            raise
        capacity = self.settings.max_batch if self.capacity is None else self.capacity
        return StartingDiffusionReplica(process, config, self.init_timeout, capacity)

    def close(self) -> None:
        """See `ReplicaLaunch`: nothing is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class StartingDiffusionReplica:
    """A replica whose process is starting."""

    process: WorkerProcess
    config: WorkerConfig
    timeout: float
    capacity: int

    @property
    def link(self) -> Connection:
        """See `StartingReplica`."""
        return self.process.link

    def ready(self, check: Check = no_check) -> DiffusionReplica:
        """Wait until it is ready. See `StartingReplica`.

        Raises:
            OmniConfigError: The program, a setting or the checkpoint is wrong.
            StartFailure: It did not start for any other reason.
        """
        try:
            self.process.wait_until_ready(self.timeout, check)
        except BaseException:
            self.cancel()
            raise
        return DiffusionReplica(self.process, self.config, self.capacity)

    def abandon(self) -> None:
        """See `StartingReplica`."""
        self.process.kill()

    def cancel(self) -> None:
        """See `StartingReplica`."""
        self.process.stop(0)
        shutil.rmtree(self.config.folder, ignore_errors=True)
