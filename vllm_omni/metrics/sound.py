# SPDX-License-Identifier: Apache-2.0
"""When a request's sound came, and whether it could be played without a gap."""

from dataclasses import dataclass


@dataclass(slots=True)
class SoundMeter:
    """Follows the pieces of one request's sound; times are `time.monotonic()`.

    Attributes:
        arrival: When the request came.
        first: When the first piece came.
        last: When the last piece came.
        seconds: Of sound, so far.
        frames: Samples, so far.
        underrun_s: Longest time that a player which started with the first piece had nothing.
    """

    arrival: float
    first: float | None = None
    last: float = 0.0
    seconds: float = 0.0
    frames: int = 0
    underrun_s: float = 0.0
    _starved_s: float = 0.0

    def add(self, now: float, frames: int, rate: int) -> None:
        """A piece came."""
        if self.first is None:
            self.first = now
        else:
            # A gap moves the rest of the playback back, so only what exceeds former gaps is new.
            gap = now - self.first - self.seconds - self._starved_s
            if gap > 0:
                self._starved_s += gap
                self.underrun_s = max(self.underrun_s, gap)
        self.last = now
        self.seconds += frames / rate
        self.frames += frames
