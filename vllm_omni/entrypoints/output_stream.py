# SPDX-License-Identifier: Apache-2.0
"""What waits for the caller of one request: bounded, whatever the caller does."""

import asyncio
from collections import deque

from vllm.sampling_params import RequestOutputKind

from vllm_omni.engine.messages import Emit, ErrorMessage
from vllm_omni.errors import SlowClientError

OVERHEAD_BYTES = 1024
"""What an output takes beside its samples, roughly."""


class OutputStream:
    """A request's outputs on their way to its caller.

    Text that has not been read is joined with what follows, so that it takes one place and only
    the memory of its tokens. Everything else counts, and too much of it ends the stream.

    Args:
        text_kind: How the caller wants text.
        max_bytes: Most that may wait.

    Attributes:
        failed: Whether its last message is an error.
    """

    def __init__(self, text_kind: RequestOutputKind, max_bytes: int) -> None:
        self._aggregate = text_kind == RequestOutputKind.DELTA
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting: deque[Emit | ErrorMessage] = deque()
        self._unread_text: Emit | None = None
        self._ready = asyncio.Event()
        self.failed = False

    def put(self, message: Emit | ErrorMessage) -> bool:
        """Add a message; an error is the last one.

        Returns:
            False if it was too much; then what waited is dropped and an error ends the stream.
        """
        if self.failed:
            return True
        if isinstance(message, ErrorMessage):
            self.failed = True
            self._waiting.append(message)
            self._ready.set()
            return True
        if self._joined(message):
            return True
        self._bytes += _size(message)
        if self._bytes > self._max_bytes:
            error = SlowClientError(
                f"more than {self._max_bytes} bytes of the answer wait to be read "
                "(--max-stream-buffer-bytes)"
            )
            self._waiting.clear()
            self._unread_text = None
            self.put(ErrorMessage(error=str(error), request_id=message.request_id, cause=error))
            return False
        self._waiting.append(message)
        if _is_text(message):
            self._unread_text = message
        self._ready.set()
        return True

    async def get(self) -> Emit | ErrorMessage:
        """The next message, when it comes."""
        if not self._waiting:
            self._ready.clear()
            await self._ready.wait()
        message = self._waiting.popleft()
        if message is self._unread_text:
            self._unread_text = None
        if isinstance(message, Emit):
            self._bytes -= _size(message)
        return message

    def _joined(self, message: Emit) -> bool:
        """Join text with unread text; the request's last output stays by itself."""
        if self._unread_text is None or message.last or not _is_text(message):
            return False
        self._unread_text.output.add(message.output, aggregate=self._aggregate)
        return True


def _is_text(message: Emit) -> bool:
    return message.output.final_output_type == "text"


def _size(message: Emit) -> int:
    audio = message.output.audio
    return OVERHEAD_BYTES + (0 if audio is None else audio.samples.nbytes)
