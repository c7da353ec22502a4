# SPDX-License-Identifier: Apache-2.0
"""The one place that knows about devices: what kind of host this is, its numbering, its memory."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_omni.config.devices import Host
from vllm_omni.config.ledger import MemorySource
from vllm_omni.errors import OmniConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Host",
    "current_host",
    "device_environment",
    "device_memory",
    "driver_in_use",
    "environment",
    "to_device",
]


def current_host() -> Host:
    """This machine: its platform and the accelerators that the process may see."""
    return Host.current()


def device_memory(platform: str) -> MemorySource | None:
    """Who knows how much memory the devices of a platform have; None for nobody."""
    if platform != "cuda":
        return None
    from vllm_omni.platforms.cuda.nvml import NvmlMemory

    return NvmlMemory()


def driver_in_use(platform: str) -> bool:
    """Whether this process has begun to use the devices, so that forks of it cannot."""
    if platform != "cuda":
        return False
    from vllm_omni.platforms.cuda import driver

    return driver.driver_in_use()


def device_environment(
    devices: Sequence[str],
    *,
    variable: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Environment that lets a child process see exactly these devices.

    Indices of a plan count the devices that this process sees, which is itself often restricted to
    some of the machine's: with `CUDA_VISIBLE_DEVICES=4,5`, the child's device "1" is 5.

    Args:
        devices: Of one replica, from `StagePlan.devices`.
        variable: Name of the platform's variable. Default: vLLM's for this platform.
        environ: This process's environment.
    """
    if not devices or devices[0] == "cpu":
        return {}
    if variable is None:
        from vllm.platforms import current_platform

        variable = current_platform.device_control_env_var
    visible = [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]
    if not visible:
        return {variable: ",".join(devices)}
    if max(map(int, devices)) >= len(visible):
        raise OmniConfigError(
            f"devices {','.join(devices)}: {variable}={environ[variable]} shows only "
            f"{len(visible)} of them, counted from 0"
        )
    return {variable: ",".join(visible[int(device)] for device in devices)}


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """A copy of a tensor of the host, which the host does not wait for; on CPU the tensor."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
