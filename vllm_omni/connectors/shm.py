# SPDX-License-Identifier: Apache-2.0
"""Tensors between the processes of one host, through files in /dev/shm (row A-80).

A payload is written once with `write` (on tmpfs half the time of a mapping, and a full medium is an
error instead of a SIGBUS), and read as a mapping whose name is removed at once: from then on the
memory lives as long as the tensors that view it. A small payload is copied out instead, which takes
half the time of mapping it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from vllm_omni.connectors import segments
from vllm_omni.connectors.base import OmniConnector, Payload, PutResult, request_of
from vllm_omni.connectors.serialization import (
    ALIGNMENT,
    Encoded,
    decode,
    encode,
    encode_rows,
)
from vllm_omni.handles import TensorHandle

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MEDIUM_FULL = (errno.ENOSPC, errno.EDQUOT)
_BUFFERS_PER_WRITE = 512  # IOV_MAX is 1024.
_FIRST_PRUNE = 1024
_MAPPED_FROM_BYTES = 65536


class SharedMemoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the connector, as the deploy YAML's `extra` gives them.

    Attributes:
        inline_small_payloads: Send payloads below the threshold inside of the handle.
        shm_threshold_bytes: The size from which a payload always goes through shared memory.
        directory: A tmpfs that all stages of the deployment see.
    """

    inline_small_payloads: bool = False
    shm_threshold_bytes: Annotated[int, msgspec.Meta(ge=0)] = 65536
    directory: str = str(segments.DEFAULT_DIRECTORY)


class SharedMemoryConnector(OmniConnector):
    """The default connector on one host.

    Safe to use from many threads, and in a child after a fork (which then owns nothing of what its
    parent wrote). Whoever starts a deployment also calls `segments.sweep_stale` before and, once
    its children are gone, `segments.sweep`: nothing is left after a SIGKILL then.

    Args:
        deployment_id: Common to all processes of a deployment and to no others; by default the
            environment's VLLM_OMNI_DEPLOYMENT_ID.
        options: See `SharedMemoryOptions`.
    """

    def __init__(
        self, deployment_id: str | None = None, options: SharedMemoryOptions | None = None
    ) -> None:
        self._deployment_id = segments.resolve_deployment_id(deployment_id)
        self._options = options or SharedMemoryOptions()
        self._directory = Path(self._options.directory)
        self._lock = segments.DeploymentLock(self._deployment_id, self._directory)
        self._start_anew()
        self._lock.acquire()
        _instances.add(self)

    def put(self, from_stage: str, to_stage: str, key: str, tensors: Payload) -> PutResult:
        began = time.monotonic()
        payload = encode(tensors)
        size = payload.size
        request_id = request_of(key)
        if self._options.inline_small_payloads and size < self._options.shm_threshold_bytes:
            self._count(inline_writes=1, bytes=size)
            inline = payload.to_bytes()
            took = time.monotonic() - began
            return PutResult(True, size, TensorHandle(key, size, inline, began, took))
        name = segments.segment_name(self._deployment_id, request_id, key)
        newly_owned = self._own(name)
        try:
            self._write(name, payload)
        except FileExistsError:
            self._disown(name, newly_owned)
            raise ValueError(
                f"key {key!r} from {from_stage} to {to_stage} is stored already"
            ) from None
        except OSError as error:
            self._disown(name, newly_owned)
            if error.errno not in _MEDIUM_FULL:
                raise
            self._count(full=1)
            return PutResult(False, size, None)
        self._count(shm_writes=1, bytes=size)
        if self._closed:  # While this thread wrote: `close` may have come before the file.
            segments.remove(self._directory, [name])
        took = time.monotonic() - began
        return PutResult(True, size, TensorHandle(key, size, None, began, took))

    def get(
        self, from_stage: str, to_stage: str, key: str, handle: TensorHandle
    ) -> dict[str, torch.Tensor]:
        if handle.inline is not None:
            tensors = decode(handle.inline)
        else:
            name = segments.segment_name(self._deployment_id, request_of(key), key)
            payload = self._take(name, handle.nbytes)
            if payload is None:
                raise KeyError(key)
            tensors = decode(payload)
        self._count(gets=1)
        return tensors

    def put_rows(
        self, from_stage: str, to_stage: str, keys: Sequence[str], tensors: Payload
    ) -> list[PutResult]:
        row = sum(each[:1].nbytes for each in tensors.values())
        # A header and padding come to it.
        small = row + len(tensors) * ALIGNMENT < self._options.shm_threshold_bytes // 2
        if not (self._options.inline_small_payloads and small):
            return super().put_rows(from_stage, to_stage, keys, tensors)
        began = time.monotonic()
        payloads = encode_rows(tensors)
        took = (time.monotonic() - began) / len(keys)
        self._count(inline_writes=len(keys), bytes=sum(map(len, payloads)))
        return [
            PutResult(True, len(payload), TensorHandle(key, len(payload), payload, began, took))
            for key, payload in zip(keys, payloads, strict=True)
        ]

    def get_inline(self, handles: Sequence[TensorHandle]) -> dict[str, torch.Tensor]:
        self._count(gets=len(handles))
        return super().get_inline(handles)

    def discard(self, handle: TensorHandle) -> None:
        if handle.inline is None:
            key = handle.key
            name = segments.segment_name(self._deployment_id, request_of(key), key)
            segments.remove(self._directory, [name])

    def cleanup(self, request_id: str) -> int:
        names = segments.remove_request(self._directory, self._deployment_id, request_id)
        with self._mutex:
            self._owned.difference_update(names)
        self._count(cleanups=1)
        return len(names)

    def health(self) -> dict[str, int | float | str]:
        """Counters since this process opened the connector, and whether it is open.

        `inline_writes`, `shm_writes`, `bytes` (of both), `gets`, `cleanups` (calls), and `full`
        (puts that the medium had no room for).
        """
        with self._mutex:
            return {"status": "closed" if self._closed else "ok", **self._counters}

    def close(self) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            segments.remove(self._directory, list(self._owned))
            self._owned.clear()
            self._lock.release()

    def _start_anew(self) -> None:
        """State of a process that has written nothing yet."""
        self._mutex = threading.Lock()
        self._owned: set[str] = set()
        self._prune_at = _FIRST_PRUNE
        self._closed = False
        self._counters = dict.fromkeys(
            ("inline_writes", "shm_writes", "bytes", "gets", "cleanups", "full"), 0
        )

    def _after_fork(self) -> None:
        """In the child: forget what belongs to the parent, and lock for itself at the next put."""
        closed = self._closed
        self._lock.drop()
        self._start_anew()
        self._closed = closed

    def _own(self, name: str) -> bool:
        """Note, before it is written, that `close` has to remove a segment; whether that is new."""
        with self._mutex:
            if self._closed:
                raise RuntimeError("the connector is closed")
            self._lock.acquire()
            if len(self._owned) >= self._prune_at:  # Most were read meanwhile.
                self._owned = segments.existing(self._directory, self._owned)
                self._prune_at = max(_FIRST_PRUNE, 2 * len(self._owned))
            is_new = name not in self._owned
            self._owned.add(name)
            return is_new

    def _disown(self, name: str, newly_owned: bool) -> None:
        """Take back an `_own` whose write failed."""
        if newly_owned:
            with self._mutex:
                self._owned.discard(name)

    def _count(self, **added: int) -> None:
        with self._mutex:
            for counter, amount in added.items():
                self._counters[counter] += amount

    def _write(self, name: str, payload: Encoded) -> None:
        """Write a new segment, or leave nothing and raise OSError."""
        path = self._directory / name
        descriptor = os.open(path, _CREATE, 0o600)
        try:
            _write_all(descriptor, payload.buffers)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _take(self, name: str, nbytes: int) -> mmap.mmap | bytearray | None:
        """The bytes of a segment, whose name is removed.

        None if it is gone or another reader was faster.
        """
        path = self._directory / name
        try:
            descriptor = os.open(path, _OPEN)
        except FileNotFoundError:
            return None
        try:
            os.unlink(path)
            if nbytes >= _MAPPED_FROM_BYTES:
                return mmap.mmap(descriptor, 0)
            payload = bytearray(nbytes)
            os.readv(descriptor, [payload])
            return payload
        except FileNotFoundError:
            return None
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, buffers: list[memoryview]) -> None:
    """`writev` until everything is written."""
    pending = [buffer for buffer in reversed(buffers) if buffer.nbytes]
    while pending:
        written = os.writev(descriptor, pending[: -_BUFFERS_PER_WRITE - 1 : -1])
        while pending and written >= pending[-1].nbytes:
            written -= pending.pop().nbytes
        if written:
            pending[-1] = pending[-1][written:]


_instances: weakref.WeakSet[SharedMemoryConnector] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for connector in list(_instances):
        connector._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
