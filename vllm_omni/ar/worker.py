# SPDX-License-Identifier: Apache-2.0
"""Workers of an AR stage: vLLM's own, with our model runner."""

import glob
import os
from pathlib import Path
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.distributed import parallel_state
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.ar.host import FOLDER, HOST_PID
from vllm_omni.ar.model_runner import OmniCPUModelRunner
from vllm_omni.ar.orphans import end_with
from vllm_omni.ar.stage_config import ArStageConfig

SHARED_MEMORY = Path("/dev/shm")


class OmniCPUWorker(CPUWorker):
    """CPU worker. vLLM's `init_device` names its runner class, so ours replaces what it made."""

    def init_device(self) -> None:
        if HOST_PID in os.environ:
            end_with(int(os.environ[HOST_PID]), ArStageConfig.of(self.vllm_config).deployment_id)
            self.distributed_init_method = _in_folder(self.distributed_init_method)
        # The engine core was forked from a process that keeps torch to one thread.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        several = self.parallel_config.world_size > 1
        if several and self.compilation_config.mode == CompilationMode.NONE:
            # vLLM compiles what ranks embed their share of a vocabulary with nevertheless, at the
            # first request.
            torch.compiler.set_stance("force_eager")
        super().init_device()
        _unlink_shared_memory(self.rank)
        self.model_runner = OmniCPUModelRunner(self.vllm_config, torch.device("cpu"))

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        _close_lone_groups()
        return times


def _in_folder(init_method: str) -> str:
    """Where workers find each other, in the engine core's folder if it is a file.

    torch removes the file only where a process ends in order; the folder goes with the core.
    """
    scheme, _, path = init_method.partition("://")
    if scheme != "file":
        return init_method
    return f"file://{os.path.join(os.environ[FOLDER], os.path.basename(path))}"


def _unlink_shared_memory(rank: int) -> None:
    """Remove the name of what this rank sums over, which all of them have mapped by now.

    vLLM removes it only where a process ends in order and runs C++'s destructors, which
    multiprocessing's children do not.
    """
    pattern = f"{glob.escape(os.environ['VLLM_DIST_IDENT'])}*-cpushm_{rank}"
    for path in SHARED_MEMORY.glob(pattern):
        path.unlink()


def _close_lone_groups() -> None:
    """Close process groups of one member: nothing is ever sent over them.

    Each keeps two gloo groups, whose threads wake a hundred times a second for nothing: together
    they are most of an idle server's CPU time.
    """
    for group in (
        parallel_state.get_dp_group(),
        parallel_state.get_pp_group(),
        parallel_state.get_pcp_group(),
        parallel_state.get_dcp_group(),
        parallel_state.get_tp_group(),
    ):
        if group.world_size == 1:
            group.destroy()
