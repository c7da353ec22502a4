# SPDX-License-Identifier: Apache-2.0
"""What a message carries instead of a tensor.

Tensors travel through a connector (shared memory, TCP, ...); control messages hold these small,
immutable references. Everything here is msgpack-encodable by msgspec.
"""

import msgspec


class TensorHandle(msgspec.Struct, frozen=True, array_like=True):
    """A named group of tensors that a connector holds.

    Attributes:
        key: Where the connector finds it; unique per deployment, starts with the request id.
        nbytes: Size of the serialized payload in bytes.
        inline: The serialized payload itself, when it was small enough to ride along. A handle
            with inline bytes owns nothing outside of itself.
        put_at: When it was put, by `time.monotonic()`; for metrics.
        put_s: Seconds that the put took.
    """

    key: str
    nbytes: int
    inline: bytes | None = None
    put_at: float = 0.0
    put_s: float = 0.0


LOST = TensorHandle("", 0, b"")
"""Stands for a payload that its medium had no room for."""


class RowSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows (one row per token position) that a stage produced for one request.

    Attributes:
        start: Position of the first row in the producing request (0 = first prompt token).
        count: Number of rows; every tensor behind `handle` has this leading size.
        handle: Where the rows are. The payload maps names (`embeds`, `hidden`, `codes`,
            `positions`) to tensors of shape [count, ...].
    """

    start: int
    count: int
    handle: TensorHandle

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.count

    @property
    def lost(self) -> bool:
        """Whether the rows could not be stored: whatever needs them fails."""
        return self.handle == LOST
