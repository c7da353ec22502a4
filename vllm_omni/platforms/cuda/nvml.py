# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's driver says of a GPU's memory, without CUDA in this process.

Stages are forked, and a process that has begun to use CUDA cannot fork others that do. NVML counts
all GPUs of the machine, in the order of the bus, whatever `CUDA_VISIBLE_DEVICES` says.
(vLLM's copy of pynvml; NVML reference: `nvmlDeviceGetMemoryInfo`.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger
from vllm.utils.import_utils import import_pynvml

from vllm_omni.config.ledger import DeviceMemory
from vllm_omni.platforms import device_environment

logger = init_logger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


class NvmlMemory:
    """A `MemorySource`."""

    def __call__(self, device: str) -> DeviceMemory | None:
        """See `MemorySource`. None as well where the driver does not say it (a GPU that shares the
        host's memory) or CUDA may number GPUs in another way than NVML."""
        name = device_environment([device], variable=VISIBLE)[VISIBLE]
        pynvml = import_pynvml()
        try:
            with _nvml(pynvml):
                if name.isdecimal() and not _numbered_as_cuda(pynvml):
                    logger.warning_once(
                        "GPUs of different kinds: their memory is checked only with %s=PCI_BUS_ID",
                        ORDER,
                    )
                    return None
                memory = pynvml.nvmlDeviceGetMemoryInfo(_handle(pynvml, name))
        except pynvml.NVMLError as error:
            logger.warning("Memory of device %s is not known: %s", device, error)
            return None
        return DeviceMemory(int(memory.total), int(memory.free))


@contextmanager
def _nvml(pynvml: Any) -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _handle(pynvml: Any, name: str) -> Any:
    """Of a GPU, by its number on the bus or its UUID, as in `CUDA_VISIBLE_DEVICES`."""
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def _numbered_as_cuda(pynvml: Any) -> bool:
    """CUDA puts the fastest GPU first unless it is told otherwise; alike ones stay in order."""
    if os.environ.get(ORDER) == "PCI_BUS_ID":
        return True
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return len({pynvml.nvmlDeviceGetName(handle) for handle in handles}) <= 1
