# SPDX-License-Identifier: Apache-2.0
"""What codecs made of recordings that came before (row A-61)."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_omni.entrypoints.single_flight import SingleFlightCache
from vllm_omni.speech.family import EncodedReference
from vllm_omni.speech.request import Reference

MAX_ENTRIES = 256
MAX_BYTES = 64 << 20


class ReferenceCache(SingleFlightCache[EncodedReference]):
    """Encoded recordings by what is heard in them (`key_of`).

    What it gives is shared between requests: nobody writes into it.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_entries, max_bytes, _nbytes)

    async def encoded(
        self,
        reference: Reference,
        encode: Callable[[Reference], Coroutine[Any, Any, EncodedReference]],
    ) -> EncodedReference:
        """A recording's encoding; see `get`.

        Raises:
            Exception: Whatever `encode` raises, to everybody who waits for it.
        """
        key = await asyncio.to_thread(key_of, reference)
        return await self.get(key, lambda: encode(reference))


def key_of(reference: Reference) -> bytes:
    """Names a recording by what is heard in it."""
    digest = hashlib.sha256(str(reference.sample_rate).encode())
    digest.update(reference.samples.tobytes())
    return digest.digest()


def _nbytes(encoded: EncodedReference) -> int:
    return sum(tensor.nbytes for tensor in encoded.values())
