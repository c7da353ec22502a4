# SPDX-License-Identifier: Apache-2.0
"""Schedulers whose decisions do not depend on how fast this machine is."""

import math

from vllm_omni.diffusion.cost import CostModel
from vllm_omni.diffusion.scheduler import CallScheduler


def unhurried(max_batch: int = 32) -> CallScheduler:
    """Batches whatever it can: no forward is too long for it."""
    return CallScheduler(max_batch, cost=CostModel(short_s=math.inf))
