# SPDX-License-Identifier: Apache-2.0
"""What goes through the pipes between rank 0 and the others: msgpack, never pickle."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

import msgspec
import torch

from vllm_omni.diffusion.switch import Autocast


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_DTYPES = {_name(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class Spot(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """Where a tensor belongs that goes through the process group.

    Attributes:
        shape: Its shape.
        dtype: Its type, as torch names it.
        on_host: It is on the CPU, whatever the ranks' devices are.
    """

    shape: tuple[int, ...]
    dtype: str
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), _name(tensor.dtype), tensor.device.type == "cpu")

    def room(self, device: torch.device) -> torch.Tensor:
        """A tensor to receive it in, on the rank's device or the CPU."""
        place = torch.device("cpu") if self.on_host else device
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device=place)


class Sequenced(msgspec.Struct, frozen=True, array_like=True, tag="sequence"):
    """A list, or a tuple."""

    entries: "list[Node]"
    is_tuple: bool


class Named(msgspec.Struct, frozen=True, array_like=True, tag="mapping"):
    """A mapping with names as keys."""

    entries: "dict[str, Node]"


class Dtype(msgspec.Struct, frozen=True, array_like=True, tag="dtype"):
    """One of torch's types."""

    name: str


Node = None | bool | int | float | str | Spot | Sequenced | Named | Dtype
"""A value without its tensors."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Arguments of one forward, without their tensors."""

    args: list[Node]
    kwargs: dict[str, Node]


class Forward(msgspec.Struct, frozen=True, array_like=True, tag="forward"):
    """To a rank: run a forward. The tensors of all shares follow, in order.

    Attributes:
        component: Which model.
        method: Which of its methods.
        autocast: Device types and torch types to run under.
        shares: What each group of ranks is to run; a group without one runs nothing.
    """

    component: str
    method: str
    autocast: tuple[tuple[str, str], ...]
    shares: list[Share]


class Resume(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """To a rank: all ranks know that the last forward failed, and go on."""


class Outcome(StrEnum):
    """How something went that a rank has done."""

    DONE = "done"
    FAILED = "failed"
    NO_MEMORY = "no memory"
    MISCONFIGURED = "misconfigured"


class Report(msgspec.Struct, frozen=True, array_like=True):
    """From a rank: it has loaded its models, or run its forward.

    Attributes:
        outcome: How that went.
        kind: Class of what was raised, which a client may be told.
        reason: What it says.
        tensors: What the rank sends back.
    """

    outcome: Outcome = Outcome.DONE
    kind: str = ""
    reason: str = ""
    tensors: tuple[Spot, ...] = ()


def packed(value: Any) -> Node:
    """A value without its tensors.

    Raises:
        TypeError: It has something in it that can be sent to no other process.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return Spot.of(value)
    if isinstance(value, list | tuple):
        return Sequenced([packed(entry) for entry in value], isinstance(value, tuple))
    if isinstance(value, Mapping):
        return Named({name: packed(entry) for name, entry in value.items()})
    if isinstance(value, torch.dtype):
        return Dtype(_name(value))
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def unpacked(node: Node, tensors: Iterator[torch.Tensor]) -> Any:
    """The value again.

    Args:
        node: What `packed` made of it.
        tensors: Its tensors, in order; as many as it has are taken.
    """
    if isinstance(node, Spot):
        return next(tensors)
    if isinstance(node, Sequenced):
        entries = [unpacked(entry, tensors) for entry in node.entries]
        return tuple(entries) if node.is_tuple else entries
    if isinstance(node, Named):
        return {name: unpacked(entry, tensors) for name, entry in node.entries.items()}
    return _DTYPES[node.name] if isinstance(node, Dtype) else node


def spots(node: Node) -> Iterator[Spot]:
    """Where its tensors belong, in order."""
    if isinstance(node, Spot):
        yield node
    elif isinstance(node, Sequenced):
        for entry in node.entries:
            yield from spots(entry)
    elif isinstance(node, Named):
        for entry in node.entries.values():
            yield from spots(entry)


def named_autocast(autocast: Autocast) -> tuple[tuple[str, str], ...]:
    """Autocast settings as they are sent."""
    return tuple((kind, _name(dtype)) for kind, dtype in autocast)


def autocast_of(named: tuple[tuple[str, str], ...]) -> Autocast:
    """Autocast settings as torch takes them."""
    return tuple((kind, _DTYPES[name]) for kind, name in named)


_ENCODER = msgspec.msgpack.Encoder()
_TO_RANK: msgspec.msgpack.Decoder[Forward | Resume] = msgspec.msgpack.Decoder(Forward | Resume)
_FROM_RANK = msgspec.msgpack.Decoder(Report)


def encode(message: Forward | Resume | Report) -> bytes:
    """For a pipe."""
    return _ENCODER.encode(message)


def decode_to_rank(data: bytes) -> Forward | Resume:
    """What rank 0 says."""
    return _TO_RANK.decode(data)


def decode_report(data: bytes) -> Report:
    """What another rank says."""
    return _FROM_RANK.decode(data)
