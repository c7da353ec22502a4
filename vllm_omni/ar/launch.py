# SPDX-License-Identifier: Apache-2.0
"""Starting a replica of an AR stage.

The engine core's host is forked by the fork server (see `host`), so the server only waits for it
and several start at the same time. On CPU the host forks the engine core, which then starts within
seconds; on CUDA it spawns it. On other platforms vLLM starts it as it does everywhere.
"""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerFactory

from vllm_omni.ar.executor import RanksExecutor
from vllm_omni.ar.frontend import FrontEnds
from vllm_omni.ar.host import AT_ONCE_S, HostedCore, StartMethod
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.ar.stat_loggers import StageLogLogger, StagePrometheusLogger
from vllm_omni.config.weights import safe_load_format
from vllm_omni.connectors.factory import create_connector
from vllm_omni.errors import OmniConfigError
from vllm_omni.handles import RowSpan
from vllm_omni.platforms import environment
from vllm_omni.start_report import Check, no_check


def prepare_platform() -> None:
    """Process-wide settings, before the first engine config is made."""
    if current_platform.is_cpu():
        # Stages share the cores; without this each would pin its threads to the same ones.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    else:
        # A fork inherits an accelerator that is of no use to it from whoever has looked for one,
        # which is more than vLLM can tell; `vllm serve` does the same.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def preload(architectures: list[str]) -> None:
    """Import here what engine cores need, so that forked ones have it.

    vLLM would also inspect a lazily registered model class in a subprocess that imports vLLM once
    more; registering the class itself makes that unnecessary.
    """
    for arch in architectures:
        registered = ModelRegistry.models.get(arch)
        if registered is not None:
            ModelRegistry.register_model(arch, registered.load_model_cls())
    if current_platform.is_cpu():
        import vllm.v1.engine.core
        import vllm.v1.worker.cpu_model_runner
        import vllm.v1.worker.cpu_worker  # noqa: F401

        import vllm_omni.ar.worker  # noqa: F401


SENDERS_KEEP_MEDIA = {"_api_process_count": 2}
"""Has vLLM keep processed media where prompts are prepared, and send them whole each time.

It does so for servers of several front ends, of which none knows what an engine core has been sent.
Else a front end sends media once and then only their hash, which is wrong of a core that replaced a
dead one, of another replica than the one that got them, and after a refused request. What else
depends on the number is the share of each front end in `--mm-ipc-gpu-memory-gb`.
"""


def engine_config(
    stage: ArStageConfig,
    engine_args: Mapping[str, Any],
    hf_overrides: Callable[[Any], Any] | None = None,
) -> VllmConfig:
    """vLLM's config of a stage: the deployment's engine arguments plus our seams."""
    args = {**engine_args, **SENDERS_KEEP_MEDIA, "load_format": safe_load_format(engine_args)}
    args["additional_config"] = {
        **args.get("additional_config", {}),
        **stage.to_additional_config(),
    }
    if hf_overrides is not None:
        if args.get("hf_overrides"):
            raise OmniConfigError(
                f"stage {stage.stage!r}: hf_overrides is not possible for a stage whose config is "
                "part of the checkpoint's"
            )
        args["hf_overrides"] = hf_overrides
    if stage.row_driven:
        args["skip_tokenizer_init"] = True
        # The checkpoint's generation config is the thinker's: its end tokens mean nothing here.
        args["generation_config"] = "vllm"
    if current_platform.is_cpu():
        args["worker_cls"] = "vllm_omni.ar.worker.OmniCPUWorker"
        args["scheduler_cls"] = "vllm_omni.ar.scheduler.OmniScheduler"
        args["async_scheduling"] = False
        if args.get("distributed_executor_backend", "mp") == "mp":
            # The class itself: the CPU platform turns the name "uni" back into "mp".
            alone = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1) == 1
            args["distributed_executor_backend"] = UniProcExecutor if alone else RanksExecutor
    elif current_platform.is_cuda():
        args["worker_cls"] = "vllm_omni.ar.cuda.worker.OmniGPUWorker"
        planned_ahead = args.setdefault("async_scheduling", True)
        name = "OmniAsyncScheduler" if planned_ahead else "OmniScheduler"
        args["scheduler_cls"] = f"vllm_omni.ar.scheduler.{name}"
        # What vLLM calls so is that the model may be fed vectors.
        args["enable_prompt_embeds"] = stage.row_driven or args.get("enable_prompt_embeds", False)
    elif stage.emits or stage.row_driven:
        raise OmniConfigError(
            f"stage {stage.stage!r}: stages that exchange rows run on CPU and CUDA only so far"
        )
    return AsyncEngineArgs(**args).create_engine_config()


@dataclass(frozen=True, slots=True)
class Told:
    """What a replica tells of its work.

    Attributes:
        metrics: Give Prometheus vLLM's metrics.
        stats: Log vLLM's statistics whenever `do_log_stats` is called.
        traces: Make vLLM's spans for requests that have a trace.
    """

    metrics: bool = False
    stats: bool = False
    traces: bool = False

    @property
    def loggers(self) -> list[StatLoggerFactory]:
        """Where vLLM's statistics go; none are kept if to nowhere."""
        made: list[StatLoggerFactory] = []
        if self.metrics or self.traces:  # vLLM's spans are made of its statistics
            made.append(StagePrometheusLogger)
        if self.stats:
            made.append(StageLogLogger)
        return made


def _start_method() -> StartMethod:
    """A fork of a process that has looked for an accelerator cannot use it: who did is more than
    vLLM can tell."""
    return "fork" if current_platform.is_cpu() else "spawn"


def _hosted(config: VllmConfig) -> bool:
    """Whether the engine core has a host, which can be of one only."""
    if current_platform.is_cpu():
        return True
    return current_platform.is_cuda() and config.parallel_config.data_parallel_size == 1


@dataclass(frozen=True, slots=True)
class ArLaunch:
    """How to start a replica of an AR stage, as often as it has to be.

    Attributes:
        config: vLLM's config, pickled, because an engine that starts writes into its own.
        environment: Of the engine core's process.
        told: What is told of its work.
        timeout: Seconds that it may take to be ready.
        devices: Accelerators that it runs on, as the plan numbers them.
        start_method: How its host starts the engine core.
        front_ends: Those that it has had.
    """

    config: bytes
    environment: dict[str, str]
    told: Told
    timeout: float
    devices: tuple[str, ...] = ()
    start_method: StartMethod = field(default_factory=_start_method)
    front_ends: FrontEnds = field(default_factory=FrontEnds, compare=False)

    @classmethod
    def of(
        cls,
        config: VllmConfig,
        environment: Mapping[str, str],
        *,
        told: Told | None = None,
        timeout: float = 300.0,
        devices: tuple[str, ...] = (),
    ) -> "ArLaunch":
        """From a config that no engine has used yet."""
        pickled = bytes(ForkingPickler.dumps(config))
        return cls(pickled, dict(environment), told or Told(), timeout, devices)

    def begin(self) -> "StartingArReplica":
        """Start the engine core, without waiting for it.

        Raises:
            ForkServerGoneError: There is nobody to fork it.
        """
        config = ForkingPickler.loads(self.config)
        core = None
        if _hosted(config):
            core = HostedCore.start(
                config,
                Executor.get_class(config),
                bool(self.told.loggers),
                self.environment,
                self.start_method,
            )
        return StartingArReplica(self, config, core)

    def close(self) -> None:
        """See `ReplicaLaunch`."""
        self.front_ends.close()


@dataclass(frozen=True, slots=True, eq=False)
class StartingArReplica:
    """A replica whose engine core is starting."""

    launch: ArLaunch
    config: VllmConfig
    core: HostedCore | None

    @property
    def link(self) -> Connection | None:
        """See `StartingReplica`."""
        return None if self.core is None else self.core.child.link

    def ready(self, check: Check = no_check) -> ArReplica:
        """Wait for the engine core and make its front end. See `StartingReplica`.

        Raises:
            StartFailure: The engine core did not start.
            Exception: Whatever vLLM raises for its front end, or where it starts the engine core.
        """
        stage = ArStageConfig.of(self.config)
        connector = create_connector(stage.connector, stage.connector_extra, stage.deployment_id)

        def discard(span: RowSpan) -> None:
            connector.discard(span.handle)

        try:
            if self.core is not None:
                self.core.wait_until_ready(self.launch.timeout, check)
                self.core.raise_if_ended()
            # Where vLLM starts the engine core, it does so with what this process's environment is.
            with nullcontext() if self.core else environment(self.launch.environment):
                llm = self.launch.front_ends.make(
                    self.config,
                    self.launch.told.loggers,
                    discard=discard,
                    core=self.core,
                    tracing=self.launch.told.traces,
                )
        except BaseException:
            connector.close()
            self.cancel()
            raise
        return ArReplica(llm, connector)

    def abandon(self) -> None:
        """See `StartingReplica`."""
        if self.core is not None:
            self.core.child.kill(signal.SIGTERM)

    def cancel(self) -> None:
        """See `StartingReplica`."""
        if self.core is not None:
            self.core.stop(AT_ONCE_S)
