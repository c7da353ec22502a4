# SPDX-License-Identifier: Apache-2.0
"""How many samples a stream of bare or WAV samples has brought so far."""

import struct
from collections.abc import Mapping

from vllm_omni.benchmarks.backends.calling import AnswerError

RATE, CHANNELS, BITS = 24_000, 1, 16
"""Of a server that does not say: 16-bit samples of 24 kHz, one channel, as OpenAI's `pcm`."""
MAX_HEADER = 4096
FORMATS = ("pcm", "wav")


class PcmReader:
    """Counts samples while they come.

    Args:
        format: One of `FORMATS`.
        headers: Of the response; `X-Sample-Rate`, `X-Channels`, `X-Bits-Per-Sample` are read.
    """

    def __init__(self, format: str, headers: Mapping[str, str]) -> None:
        self.rate = int(headers.get("X-Sample-Rate", RATE))
        channels = int(headers.get("X-Channels", CHANNELS))
        self._frame = channels * int(headers.get("X-Bits-Per-Sample", BITS)) // 8
        self._header = bytearray() if format == "wav" else None
        self._rest = 0

    def feed(self, data: bytes) -> int:
        """Bytes came: how many samples (per channel) are complete with them.

        Raises:
            AnswerError: They are not a WAV file's.
        """
        if self._header is not None:
            self._header += data
            data = self._after_header(self._header)
        frames, self._rest = divmod(self._rest + len(data), self._frame)
        return frames

    def _after_header(self, header: bytearray) -> bytes:
        start = header.find(b"data", 12)
        if start < 0 or len(header) < start + 8:
            if len(header) > MAX_HEADER or not b"RIFF".startswith(bytes(header[:4])):
                raise AnswerError("the answer is no WAV file")
            return b""
        fmt = header.find(b"fmt ", 12, start)
        if fmt < 0:
            raise AnswerError("the answer's WAV header has no format")
        self.rate = int(struct.unpack_from("<I", header, fmt + 12)[0])
        self._frame = int(struct.unpack_from("<H", header, fmt + 20)[0])
        self._header = None
        return bytes(header[start + 8 :])
