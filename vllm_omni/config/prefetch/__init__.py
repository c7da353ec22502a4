# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Hugging Face hub, complete in the local cache before any stage is started.

Stages and replicas would else download the same files at the same time, and so would every server
of a node that is started on a fresh disk (row A-81).
"""

from vllm_omni.config.prefetch.lock import node_lock, vllm_lock
from vllm_omni.config.prefetch.snapshot import fetch
from vllm_omni.config.prefetch.wanted import Checkpoint, checkpoints

__all__ = ["Checkpoint", "checkpoints", "fetch", "node_lock", "vllm_lock"]
