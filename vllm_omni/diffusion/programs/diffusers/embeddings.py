# SPDX-License-Identifier: Apache-2.0
"""What text encoders made of prompts that came before: a bounded cache per replica."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_omni.diffusion.collate import iter_tensors
from vllm_omni.diffusion.program import current_program
from vllm_omni.diffusion.proxy import make_proxy

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEFAULT_BYTES = 256 << 20
MAX_KEY_BYTES = 1 << 20
"""Inputs past this size (pictures) are not worth their digest."""


class EmbeddingCache:
    """Results of encoders by what they were given; the least recently used go first.

    Args:
        max_bytes: Of all results together; 0 for no cache.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()
        self._views: dict[str, Any] = {}
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def view(self, name: str, encoder: ModuleT) -> ModuleT:
        """An encoder's proxy that asks this cache first."""
        if name not in self._views:
            self._views[name] = remembering(name, encoder, self)
        return self._views[name]

    def get(self, key: bytes) -> Any:
        """The result, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[1]

    def put(self, key: bytes, result: Any) -> None:
        """Keep a result, if there is room for one of its size at all."""
        size = sum(t.nbytes for t in iter_tensors(result))
        if size > self._max_bytes:
            return
        if (old := self._entries.pop(key, None)) is not None:
            self.bytes -= old[0]
        self._entries[key] = size, result
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, (freed, _) = self._entries.popitem(last=False)
            self.bytes -= freed


def remembering(name: str, encoder: ModuleT, cache: EmbeddingCache) -> ModuleT:
    """A view of an encoder's proxy that asks the cache first; to be made once per replica."""

    def call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = current_program()
        variant = None if program is None else program.variant(name)
        key = _key(repr((name, variant)), args, kwargs)
        if key is None:
            return encoder(*args, **kwargs)
        result = cache.get(key)
        if result is None:
            result = encoder(*args, **kwargs)
            cache.put(key, result)
        return result

    return make_proxy(encoder, ("forward",), call)


def is_encoder(name: str, part: Any) -> bool:
    """Whether a component encodes prompts: one of transformers' models under such a name."""
    return isinstance(part, PreTrainedModel) and "text_encoder" in name


def _key(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
    """A digest of everything that the result depends on; None if there is none."""
    parts: list[bytes] = [name.encode()]
    if not _describe((args, dict(kwargs)), parts) or sum(map(len, parts)) > MAX_KEY_BYTES:
        return None
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _describe(value: Any, parts: list[bytes]) -> bool:
    """Append what a value is; False for a kind that has no value, only identity."""
    if isinstance(value, torch.Tensor):
        if value.nbytes > MAX_KEY_BYTES:
            return False
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        kind = f"{value.dtype} {tuple(value.shape)} {value.device}"
        parts += [kind.encode(), flat.numpy().tobytes()]
        return True
    if isinstance(value, Mapping):
        parts.append(f"map {len(value)}".encode())
        return all(_describe(key, parts) and _describe(value[key], parts) for key in value)
    if isinstance(value, list | tuple):
        parts.append(f"list {len(value)}".encode())
        return all(_describe(each, parts) for each in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        parts.append(repr(value).encode())
        return True
    return False
