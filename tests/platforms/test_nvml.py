# SPDX-License-Identifier: Apache-2.0
"""NVML's word against CUDA's, on a machine with a GPU: `pytest tests/platforms/test_nvml.py`."""

import pytest
import torch
from vllm.platforms import current_platform

from vllm_omni.config.ledger import SLACK
from vllm_omni.platforms import device_memory

needs_gpu = pytest.mark.skipif(not current_platform.is_cuda(), reason="needs an NVIDIA GPU")


@pytest.mark.cuda
@pytest.mark.core_model
@needs_gpu
def test_nvml_says_what_cuda_says_without_cuda() -> None:
    source = device_memory("cuda")
    assert source is not None
    memory = source("0")
    assert memory is not None
    assert not torch.cuda.is_initialized()
    free, total = torch.cuda.mem_get_info(0)
    context = 1 << 30  # at most, which CUDA has taken by now
    print(f"NVML {memory}, CUDA free {free} of {total}")
    assert abs(memory.total - total) < SLACK * total
    assert -SLACK * total < memory.free - free < context + SLACK * total
