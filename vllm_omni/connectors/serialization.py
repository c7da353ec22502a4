# SPDX-License-Identifier: Apache-2.0
"""Named tensors as one run of bytes and back, without pickle and without a copy on reading.

Layout, little-endian::

    4 bytes  magic
    4 bytes  length of the header in bytes
    n bytes  header: msgpack of [[name, dtype, shape], ...]
    ...      the tensors' bytes in that order, C-contiguous, each starting at a multiple of 64

Where a tensor lies follows from the header alone, so there is nothing to forge: a reader computes
every offset and the total size from names, dtypes and shapes, and compares it with the buffer
before it makes a tensor.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import torch

ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 64
_MAX_PAYLOAD_BYTES = 1 << 62
_MAGIC = b"VOT1"
_PREFIX = struct.Struct("<4sI")

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Entry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What the header says about one tensor."""

    name: str
    dtype: str
    shape: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_DIMENSIONS)
    ]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


_decode_header = msgspec.msgpack.Decoder(list[_Entry]).decode
_encode_header = msgspec.msgpack.Encoder().encode


class Encoded:
    """A payload ready to be written: its size, and its bytes as a list of buffers.

    Attributes:
        size: Bytes of the whole payload.
        buffers: What to write, in order (header, padding, tensor bytes). The tensors' buffers are
            views of contiguous CPU tensors, and copies of others.
    """

    def __init__(self, buffers: list[memoryview]) -> None:
        self.buffers = buffers
        self.size = sum(buffer.nbytes for buffer in buffers)

    def write_into(self, target: memoryview) -> None:
        """Write the payload at the start of `target`, a writable buffer of `size` bytes or more."""
        target = target.cast("B")
        position = 0
        for buffer in self.buffers:
            target[position : position + buffer.nbytes] = buffer
            position += buffer.nbytes

    def to_bytes(self) -> bytes:
        """The payload in one piece."""
        return b"".join(self.buffers)


def encode(tensors: Mapping[str, torch.Tensor]) -> Encoded:
    """Prepare named tensors for writing; any dense tensor of any shape, strides and device.

    The tensors must not change until the payload is written.

    Raises:
        TypeError: A sparse or quantized tensor, or one of a dtype narrower than a byte.
        ValueError: So many tensors or such long names that the header passes 1 MiB.
    """
    entries = [
        _Entry(name, _dtype_name(name, tensor), list(tensor.shape))
        for name, tensor in tensors.items()
    ]
    buffers = [memoryview(_head(entries))]
    end = buffers[0].nbytes
    for (start, stop), tensor in zip(_places(entries, end), tensors.values(), strict=True):
        if start != stop:
            buffers += (memoryview(bytes(start - end)), _tensor_bytes(tensor))
            end = stop
    return Encoded(buffers)


def decode(buffer: bytes | bytearray | memoryview | mmap.mmap) -> dict[str, torch.Tensor]:
    """The tensors of a payload, as views that keep `buffer` alive.

    A read-only buffer (`bytes`) is copied once, because torch has no read-only tensors.

    Raises:
        ValueError: The bytes are not exactly one payload.
    """
    view = memoryview(buffer).cast("B")
    entries, header_end = _read_header(view)
    places = list(_places(entries, header_end))
    size = _size(places, header_end)
    if size != view.nbytes:
        raise ValueError(f"payload of {view.nbytes} bytes, its header says {size}")
    if view.readonly:
        view = memoryview(bytearray(view))
    tensors = {}
    for entry, (start, stop) in zip(entries, places, strict=True):
        dtype = _DTYPES[entry.dtype]
        if start == stop:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        count = (stop - start) // dtype.itemsize
        flat = torch.frombuffer(view, dtype=dtype, count=count, offset=start)
        tensors[entry.name] = flat.view(entry.shape)
    return tensors


def encode_rows(tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """n payloads at once, as `encode` makes of each row: the i-th holds [1, ...] of each tensor.

    Args:
        tensors: Each [n, ...]; n is at least one.

    Raises:
        TypeError, ValueError: As `encode`.
    """
    counts = {len(tensor) if tensor.dim() else 0 for tensor in tensors.values()}
    if len(counts) != 1 or not (count := counts.pop()):
        raise ValueError("rows are tensors of one leading size, at least 1")
    entries = [
        _Entry(name, _dtype_name(name, tensor), [1, *tensor.shape[1:]])
        for name, tensor in tensors.items()
    ]
    head = _head(entries)
    places = list(_places(entries, len(head)))
    size = _size(places, len(head))
    whole = torch.zeros(count, size, dtype=torch.uint8)
    whole[:, : len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for (start, stop), tensor in zip(places, tensors.values(), strict=True):
        if start != stop:
            bytes_ = torch.frombuffer(_tensor_bytes(tensor), dtype=torch.uint8)
            whole[:, start:stop] = bytes_.view(count, -1)
    flat = whole.numpy().tobytes()
    return [flat[i : i + size] for i in range(0, count * size, size)]


def decode_rows(payloads: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """The tensors of payloads that are laid out alike, joined in their first dimension.

    Args:
        payloads: At least one; tensors have at least one dimension.

    Raises:
        ValueError: They are not alike, or the first one is no payload.
    """
    if not payloads:
        raise ValueError("no payload to join")
    entries, header_end = _read_header(memoryview(payloads[0]))
    if not all(entry.shape for entry in entries):
        raise ValueError("payload with a tensor of no dimension, which cannot be joined")
    places = list(_places(entries, header_end))
    size = _size(places, header_end)
    header = payloads[0][:header_end]
    if not all(len(each) == size and each.startswith(header) for each in payloads):
        raise ValueError("payloads that are not alike")
    count = len(payloads)
    whole = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).view(count, size)
    tensors = {}
    for entry, (start, stop) in zip(entries, places, strict=True):
        shape, dtype = [count * entry.shape[0], *entry.shape[1:]], _DTYPES[entry.dtype]
        if math.prod(max(size, 1) for size in shape) * 16 > _MAX_PAYLOAD_BYTES:
            raise ValueError("payloads that are too large together")
        if start == stop:
            tensors[entry.name] = torch.empty(shape, dtype=dtype)
        else:
            own = whole[:, start:stop].contiguous().view(-1)
            tensors[entry.name] = own.view(dtype).view(shape)
    return tensors


def header_of(payload: bytes) -> bytes:
    """What two payloads have in common if `decode_rows` can join them, but for their sizes."""
    if len(payload) < _PREFIX.size:
        return payload
    return payload[: _PREFIX.size + _PREFIX.unpack_from(payload)[1]]


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise TypeError(f"tensor {name!r}: cannot send {tensor.dtype}, {tensor.layout}")
    return dtype


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dense = tensor.detach().cpu().contiguous()
    return memoryview(dense.reshape(-1).view(torch.uint8).numpy())


def _head(entries: list[_Entry]) -> bytes:
    """What stands before the tensors' bytes."""
    header = _encode_header(entries)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of {len(entries)} tensors takes {len(header)} bytes")
    return _PREFIX.pack(_MAGIC, len(header)) + header


def _size(places: Sequence[tuple[int, int]], header_end: int) -> int:
    """Bytes of a payload whose tensors are at these places."""
    return max((stop for start, stop in places if start != stop), default=header_end)


def _places(entries: list[_Entry], header_end: int) -> Iterator[tuple[int, int]]:
    """Start and end of each tensor's bytes; an empty tensor takes no room, not even padding."""
    end = header_end
    for entry in entries:
        nbytes = entry.nbytes
        start = end + -end % ALIGNMENT if nbytes else end
        end = start + nbytes
        yield start, end


def _read_header(view: memoryview) -> tuple[list[_Entry], int]:
    if view.nbytes < _PREFIX.size:
        raise ValueError(f"payload of {view.nbytes} bytes is cut short")
    magic, length = _PREFIX.unpack_from(view)
    header_end = _PREFIX.size + length
    if magic != _MAGIC or length > MAX_HEADER_BYTES or header_end > view.nbytes:
        raise ValueError("not a tensor payload, or one whose header is cut short")
    try:
        entries = _decode_header(view[_PREFIX.size : header_end])
    except msgspec.DecodeError as error:
        raise ValueError(f"payload with a broken header: {error}") from None
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"payload with an unknown dtype: {entry.dtype[:40]!r}")
        # An empty tensor may have huge other sizes: torch multiplies them for its strides.
        if math.prod(max(size, 1) for size in entry.shape) * 16 > _MAX_PAYLOAD_BYTES:
            raise ValueError("payload with an impossible shape")
    if len({entry.name for entry in entries}) != len(entries):
        raise ValueError("payload with two tensors of one name")
    return entries, header_end
