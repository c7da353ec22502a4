# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call, taken apart, compared bit by bit and put together again."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.collate import BY_VALUE

Path = tuple[Any, ...]
"""Where an argument is: (0, index) or (1, name), then keys and indices of what it is in."""

Leaves = Mapping[Path, Any]
"""What a call's arguments are made of: values, and the types of the containers around them."""

_PLAIN = (*BY_VALUE, torch.Size)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""
_SMALL = 4096
"""Elements of tensors that pipelines make anew for each call: times, not latents."""


class OpaqueArgumentError(Exception):
    """An argument is no value: a call might change it, or what it is might not show."""


def leaves_of(call: Call) -> Leaves:
    """A call's arguments as they are now; its tensors are not copied.

    Raises:
        OpaqueArgumentError: One of them is neither a plain tensor nor a plain value.
    """
    return dict(_walk((call.args, call.kwargs), ()))


def put_together(call: Call, leaves: Leaves) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments built as those of a call, of other leaves."""
    return _built((call.args, call.kwargs), leaves, ())


def size_of(leaves: Leaves) -> int:
    """Bytes of the tensors."""
    return sum(leaf.nbytes for leaf in leaves.values() if isinstance(leaf, torch.Tensor))


def differing(one: Leaves, other: Leaves) -> frozenset[Path]:
    """Where two calls' arguments are not the same, bit by bit. Waits for the device, once."""
    found, unclear = _compare(one, other)
    flags: defaultdict[torch.device, dict[Path, torch.Tensor]] = defaultdict(dict)
    for path in unclear:
        a, b = _bits(one[path]), _bits(other[path])
        flags[a.device][path] = (a == b).all()
    for there in flags.values():
        equal = torch.stack(list(there.values())).tolist()
        found.update(path for path, same in zip(there, equal, strict=True) if not same)
    return frozenset(found)


def seem_differing(one: Leaves, other: Leaves) -> frozenset[Path]:
    """The same without looking at tensors: small ones may be equal, others are if identical."""
    found, unclear = _compare(one, other)
    return frozenset(found.union(path for path in unclear if one[path].numel() > _SMALL))


def _compare(one: Leaves, other: Leaves) -> tuple[set[Path], list[Path]]:
    """Where arguments are not the same, and where there are two tensors to compare."""
    found, tensors = set(one.keys() ^ other.keys()), []
    for path in one.keys() & other.keys():
        a, b = one[path], other[path]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
                found.add(path)
            elif a is not b:
                tensors.append(path)
        elif type(a) is not type(b) or a != b:
            found.add(path)
    return found, tensors


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    kind = type(value)
    if kind is dict:
        yield path, kind
        for key, entry in value.items():
            yield from _walk(entry, (*path, key))
    elif kind in (list, tuple):
        yield path, kind
        for index, entry in enumerate(value):
            yield from _walk(entry, (*path, index))
    elif isinstance(value, _PLAIN) or (kind is torch.Tensor and _comparable(value)):
        yield path, value
    else:
        raise OpaqueArgumentError(f"{path}: {kind.__name__}")


def _built(tree: Any, leaves: Leaves, path: Path) -> Any:
    if type(tree) is dict:
        return {key: _built(entry, leaves, (*path, key)) for key, entry in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_built(entry, leaves, (*path, i)) for i, entry in enumerate(tree))
    return leaves[path]


def _comparable(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_complex())
    return plain and tensor.element_size() in _BITS


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_BITS[tensor.element_size()])
