# SPDX-License-Identifier: Apache-2.0
"""The contract of a connector: how tensors get from one stage to the next (DESIGN.md section 8)."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from vllm_omni.connectors.serialization import decode_rows
from vllm_omni.handles import TensorHandle

Payload = Mapping[str, torch.Tensor]


class PutResult(NamedTuple):
    """Outcome of a `put`: whether it was stored, its size in bytes, and the handle to send."""

    ok: bool
    size: int
    handle: TensorHandle | None


def make_key(request_id: str, suffix: str) -> str:
    """The key of one payload of a request: ``<request id>/<suffix>``.

    A request id may be any string, so only the last ``/`` separates: a suffix holds none. A stage
    numbers its payloads in the suffix (``hidden.3``), which makes the key unique.
    """
    if "/" in suffix or not suffix:
        raise ValueError(f"a key's suffix is not empty and holds no '/': {suffix!r}")
    return f"{request_id}/{suffix}"


def request_of(key: str) -> str:
    """The request id that a key of `make_key` starts with.

    Raises:
        ValueError: The key was not made by `make_key`, so `cleanup` could never find its payload.
    """
    request_id, separator, suffix = key.rpartition("/")
    if not separator or not suffix:
        raise ValueError(f"not a key of make_key(request_id, suffix): {key!r}")
    return request_id


class OmniConnector(ABC):
    """Moves named tensors between two stages, addressed by handle.

    One instance lives in each process that sends or receives. All methods may be called from any
    thread. A payload is written once, read once, and freed by the read; whatever was never read is
    freed by `cleanup` of its request, and by `close` at the latest.
    """

    @abstractmethod
    def put(self, from_stage: str, to_stage: str, key: str, tensors: Payload) -> PutResult:
        """Store `tensors` under `key`, which is one of `make_key`.

        Any dtype, shape, strides and device will do, but no sparse or quantized tensor.
        `ok` is False when the medium is full; nothing is left behind then. Whoever learns that a
        request was released while a put was on its way calls `cleanup` once more.

        Raises:
            ValueError: The key is stored already, or is not one of `make_key`.
        """

    @abstractmethod
    def get(
        self, from_stage: str, to_stage: str, key: str, handle: TensorHandle
    ) -> dict[str, torch.Tensor]:
        """Read a payload and free it.

        Raises:
            KeyError: The payload is gone (already read, or its request was released).
        """

    def put_rows(
        self, from_stage: str, to_stage: str, keys: Sequence[str], tensors: Payload
    ) -> list[PutResult]:
        """Store many small payloads: of tensors [n, ...], row i as [1, ...] under the i-th key.

        Raises:
            ValueError: See `put`.
        """
        rows = ({name: each[i : i + 1] for name, each in tensors.items()} for i in range(len(keys)))
        return [
            self.put(from_stage, to_stage, key, row) for key, row in zip(keys, rows, strict=True)
        ]

    def get_inline(self, handles: Sequence[TensorHandle]) -> dict[str, torch.Tensor]:
        """Payloads that ride in their handles, joined in their tensors' first dimension.

        Raises:
            ValueError: They are not laid out alike (`serialization.header_of`).
        """
        return decode_rows([handle.inline for handle in handles if handle.inline is not None])

    def discard(self, handle: TensorHandle) -> None:
        """Free a payload that nobody will read; gone already is fine."""
        if handle.inline is None:
            with contextlib.suppress(KeyError):
                self.get("", "", handle.key, handle)

    @abstractmethod
    def cleanup(self, request_id: str) -> int:
        """Free everything still stored for a request, whoever wrote it. Returns how many."""

    @abstractmethod
    def health(self) -> dict[str, int | float | str]:
        """Counters and state, for metrics and debugging."""

    @abstractmethod
    def close(self) -> None:
        """Free what this instance still owns. Idempotent."""
