# SPDX-License-Identifier: Apache-2.0
"""The contract of a connector: how tensors get from one stage to the next (DESIGN.md section 8)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from vllm_omni.handles import TensorHandle

Payload = Mapping[str, torch.Tensor]


class PutResult(NamedTuple):
    """Outcome of a `put`: whether it was stored, its size in bytes, and the handle to send."""

    ok: bool
    size: int
    handle: TensorHandle | None


class OmniConnector(ABC):
    """Moves named tensors between two stages, addressed by handle.

    One instance lives in each process that sends or receives. All methods may be called from any
    thread. A payload is written once, read once, and freed by the read; whatever was never read is
    freed by `cleanup` of its request, and by `close` at the latest.
    """

    @abstractmethod
    def put(self, from_stage: str, to_stage: str, key: str, tensors: Payload) -> PutResult:
        """Store `tensors` (CPU, any dtype torch has) under `key`, which starts with the request id.

        `ok` is False when the medium is full; nothing is left behind then.
        """

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, key: str, handle: TensorHandle
    ) -> dict[str, torch.Tensor]:
        """Read a payload and free it.

        Raises:
            KeyError: The payload is gone (already read, or its request was released).
        """

    @abstractmethod
    def cleanup(self, request_id: str) -> int:
        """Free everything still stored for a request, whoever wrote it. Returns how many."""

    @abstractmethod
    def health(self) -> dict[str, int | float | str]:
        """Counters and state, for metrics and debugging."""

    @abstractmethod
    def close(self) -> None:
        """Free what this instance still owns. Idempotent."""
