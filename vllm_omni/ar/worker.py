# SPDX-License-Identifier: Apache-2.0
"""Workers of an AR stage: vLLM's own, with our model runner."""

import os

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.ar.model_runner import OmniCPUModelRunner


class OmniCPUWorker(CPUWorker):
    """CPU worker. vLLM's `init_device` names its runner class, so ours replaces what it made."""

    def init_device(self) -> None:
        # The engine core was forked from a process that keeps torch to one thread.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        super().init_device()
        self.model_runner = OmniCPUModelRunner(self.vllm_config, torch.device("cpu"))
