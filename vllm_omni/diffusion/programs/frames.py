# SPDX-License-Identifier: Apache-2.0
"""A growing sequence of rows of which only the recent ones are kept, and frames made of them."""

import torch

from vllm_omni.speech.delay import undelayed


class RowBuffer:
    """Rows of a stream by their absolute position; one per stream and kind of row."""

    def __init__(self) -> None:
        self.start = 0
        """Rows before this one are forgotten."""
        self._rows: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        """Rows that have been appended."""
        return self.start + (0 if self._rows is None else len(self._rows))

    def append(self, rows: torch.Tensor) -> None:
        """Add rows [n, ...] at the end."""
        self._rows = rows if self._rows is None else torch.cat((self._rows, rows))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), a view.

        Raises:
            IndexError: They have been forgotten or have not come yet.
        """
        if self._rows is None or not self.start <= start <= stop <= self.stop:
            raise IndexError(f"rows [{start}, {stop}) of [{self.start}, {self.stop})")
        return self._rows[start - self.start : stop - self.start]

    def forget(self, before: int) -> None:
        """Drop the rows before that position."""
        drop = min(before, self.stop) - self.start
        if drop > 0 and self._rows is not None:
            self._rows = self._rows[drop:].clone()
            self.start += drop


def check_codes(codes: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Codes as int64, known to be valid: an invalid index would take down a CUDA process.

    Args:
        codes: Integer [n, groups], on the CPU.
        groups: Codes per frame.
        size: Codes are below this.

    Raises:
        ValueError: They are not.
    """
    codes = codes.reshape(len(codes), -1)
    if codes.shape[1] != groups:
        raise ValueError(f"frames have {codes.shape[1]} codes, the decoder takes {groups}")
    if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < size:
        raise ValueError(
            f"codes from {int(codes.min())} to {int(codes.max())}, valid: 0..{size - 1}"
        )
    return codes.long()


class DelayedFrames:
    """Frames that come as rows of a delay pattern.

    Args:
        delays: Of each group.
        size: Codes are below this.
        other: What the others become; None for the nearest one.
    """

    def __init__(self, delays: tuple[int, ...], size: int, other: int | None) -> None:
        self._delays = delays
        self._size = size
        self._other = other
        self._rows = RowBuffer()

    def add(self, rows: torch.Tensor) -> torch.Tensor:
        """Take rows, integer [n, groups]; the frames that they complete, int64 [m, groups].

        Raises:
            ValueError: There is another number of groups.
        """
        if rows.shape[1:] != (len(self._delays),):
            raise ValueError(
                f"rows have {tuple(rows.shape[1:])} codes, the decoder takes {len(self._delays)}"
            )
        self._rows.append(rows)
        frames = undelayed(self._rows.rows(self._rows.start, self._rows.stop), self._delays)
        self._rows.forget(self._rows.start + len(frames))
        frames, nearest = frames.long(), frames.long().clamp(0, self._size - 1)
        if self._other is None:
            return nearest
        return torch.where(frames == nearest, frames, self._other)
