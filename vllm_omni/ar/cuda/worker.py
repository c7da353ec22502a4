# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with our model runner."""

import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_omni.ar.cuda.model_runner import OmniGPUModelRunner
from vllm_omni.ar.host import HOST_PID
from vllm_omni.ar.orphans import end_with
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.errors import OmniConfigError

WARM_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Numbers of tokens whose steps vLLM's tables of Triton settings tell apart (experts' kernels)."""


class OmniGPUWorker(Worker):
    """GPU worker of an AR stage."""

    def init_device(self) -> None:
        """Begin to use the device."""
        # The host, if there is one: of several ranks, the parent is the engine core.
        parent = int(os.environ.get(HOST_PID, os.getppid()))
        end_with(parent, ArStageConfig.of(self.vllm_config).deployment_id)
        super().init_device()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile what requests would else wait for, then capture graphs.

        Triton compiles a kernel of the experts anew for each of its settings, and for numbers that
        are a multiple of 16 and others: seconds, in the middle of other requests' answers. vLLM's
        own warm-up runs the sizes that are captured and the largest one.
        """
        if self.vllm_config.kernel_config.enable_jit_warmup:
            most = self.scheduler_config.max_num_batched_tokens
            sizes = {size + odd for size in WARM_SIZES for odd in (0, 1)}
            for size in sorted(size for size in sizes if size <= most):
                self.model_runner._dummy_run(size, skip_eplb=True)
        return super().compile_or_warm_up_model()

    def _make_model_runner(self) -> Any:
        """See vLLM's `Worker`.

        Raises:
            OmniConfigError: vLLM would use its older model runner for these settings.
        """
        if not self.use_v2_model_runner:
            raise OmniConfigError(
                "vLLM's Model Runner V2 is not possible with this stage's settings or environment "
                "(see vLLM's warning, VLLM_USE_V2_MODEL_RUNNER)"
            )
        return OmniGPUModelRunner(self.vllm_config, self.device)
