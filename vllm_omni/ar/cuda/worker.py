# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker with our model runner."""

import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.ar.cuda.model_runner import OmniGPUModelRunner
from vllm_omni.ar.orphans import end_with
from vllm_omni.ar.stage_config import ArStageConfig
from vllm_omni.errors import OmniConfigError


class OmniGPUWorker(Worker):
    """GPU worker of an AR stage."""

    def init_device(self) -> None:
        """Begin to use the device."""
        if self.local_rank == 0:
            end_with(os.getppid(), ArStageConfig.of(self.vllm_config).deployment_id)
        super().init_device()

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
