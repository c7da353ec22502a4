# SPDX-License-Identifier: Apache-2.0
"""Starting a replica of an AR stage.

On CPU the engine core is forked from this process once vLLM and the stage's model class are
imported: about 2 s instead of 15 to 20 s for a spawned interpreter that imports everything again
(measured in `prototypes/ar_seams`). A fork must come before this process runs thread pools that the
child would inherit dead, so replicas on CPU are started one after the other, from the main thread,
before any event loop, with torch kept to one thread meanwhile. On CUDA vLLM spawns as usual.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from vllm_omni.ar.frontend import StageLLM
from vllm_omni.ar.replica import ArReplica
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.connectors.factory import create_connector
from vllm_omni.errors import OmniConfigError
from vllm_omni.handles import RowSpan

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def prepare_platform() -> None:
    """Process-wide settings, before the first engine config is made."""
    if current_platform.is_cpu():
        # Stages share the cores; without this each would pin its threads to the same ones.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def preload_model_class(arch: str) -> None:
    """Import a model class here, so forked engine cores have it.

    vLLM would also inspect a lazily registered class in a subprocess that imports vLLM once more;
    registering the class itself makes that unnecessary.
    """
    registered = ModelRegistry.models.get(arch)
    if registered is not None:
        ModelRegistry.register_model(arch, registered.load_model_cls())


def engine_config(
    stage: ArStageConfig,
    engine_args: Mapping[str, Any],
    hf_overrides: Callable[[Any], Any] | None = None,
) -> VllmConfig:
    """vLLM's config of a stage: the deployment's engine arguments plus our seams."""
    args = dict(engine_args)
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
        if args.get("tensor_parallel_size", 1) == 1 and "distributed_executor_backend" not in args:
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            # The class itself: the CPU platform turns the name "uni" back into "mp".
            args["distributed_executor_backend"] = UniProcExecutor
    elif stage.emits or stage.row_driven:
        raise OmniConfigError(
            f"stage {stage.stage!r}: stages that exchange rows run on CPU only so far: vLLM's "
            "Model Runner V2, which it uses on this platform, is not wired up yet"
        )
    return AsyncEngineArgs(**args).create_engine_config()


def launch_replica(vllm_config: VllmConfig, *, log_stats: bool = False) -> ArReplica:
    """Start an engine core and its front end; returns when the model is loaded.

    Raises whatever vLLM raises when the engine does not come up.
    """
    stage = ArStageConfig.of(vllm_config)
    connector = create_connector(stage.connector, stage.connector_extra, stage.deployment_id)

    def discard(span: RowSpan) -> None:
        connector.discard(span.handle)

    with _forked_engine_core() if current_platform.is_cpu() else contextlib.nullcontext():
        llm = StageLLM(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_stats=log_stats,
            log_requests=False,
            discard=discard,
        )
    return ArReplica(llm, connector)


@contextlib.contextmanager
def _forked_engine_core() -> Iterator[None]:
    """Make vLLM fork the engine core that is created inside, from a process fit for forking."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import vllm_omni.ar.worker  # noqa: F401

    threads = torch.get_num_threads()
    before = os.environ.get(_START_METHOD)
    # The CPU platform sets "spawn" whenever a config is made, so this comes after.
    os.environ[_START_METHOD] = "fork"
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if before is None:
            os.environ.pop(_START_METHOD, None)
        else:
            os.environ[_START_METHOD] = before
