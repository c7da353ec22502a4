# SPDX-License-Identifier: Apache-2.0
"""What codecs made of recordings that came before (row A-61)."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from vllm_omni.speech.family import EncodedReference
from vllm_omni.speech.request import Reference

MAX_ENTRIES = 256
MAX_BYTES = 64 << 20


class ReferenceCache:
    """Encoded recordings by their samples; the least recently used go first.

    What it gives is shared between requests: nobody writes into it.

    Args:
        max_entries: Most recordings.
        max_bytes: Of all of them together; a larger one is not kept.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, EncodedReference] = OrderedDict()
        self._encoding: dict[bytes, asyncio.Task[EncodedReference]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> EncodedReference | None:
        """What is known of a recording."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, encoded: EncodedReference) -> None:
        """Remember one, if there is room for one of its size at all."""
        size = _bytes(encoded)
        if size > self._max_bytes:
            return
        if key in self._entries:
            self.bytes -= _bytes(self._entries.pop(key))
        self._entries[key] = encoded
        self.bytes += size
        while self.bytes > self._max_bytes or len(self._entries) > self._max_entries:
            _, gone = self._entries.popitem(last=False)
            self.bytes -= _bytes(gone)

    async def encoded(
        self, reference: Reference, encode: Callable[[Reference], Awaitable[EncodedReference]]
    ) -> EncodedReference:
        """A recording's encoding; who asks for one that is being made waits for that one.

        A caller that goes away does not take it from the others.

        Raises:
            Exception: Whatever `encode` raises, to everybody who waits for it.
        """
        key = await asyncio.to_thread(key_of, reference)
        known = self.get(key)
        if known is not None:
            return known
        task = self._encoding.get(key)
        if task is None:

            async def make() -> EncodedReference:
                made = await encode(reference)
                self.put(key, made)
                return made

            task = self._encoding[key] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: bytes, done: asyncio.Task[EncodedReference]) -> None:
        del self._encoding[key]
        if not done.cancelled():
            done.exception()  # seen, even if everybody who waited has gone


def key_of(reference: Reference) -> bytes:
    """Names a recording by what is heard in it."""
    digest = hashlib.sha256(str(reference.sample_rate).encode())
    digest.update(reference.samples.tobytes())
    return digest.digest()


def _bytes(encoded: EncodedReference) -> int:
    return sum(tensor.nbytes for tensor in encoded.values())
