# SPDX-License-Identifier: Apache-2.0
"""The one place that knows about devices. So far: what kind of host this is."""

from vllm_omni.config.devices import Host

__all__ = ["Host", "current_host"]


def current_host() -> Host:
    """This machine: its platform and the accelerators that the process may see."""
    return Host.current()
