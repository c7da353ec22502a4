# SPDX-License-Identifier: Apache-2.0
"""The delay pattern of codec language models: the codes of a frame are drawn one after another.

The model makes a *row* per step, of one code per group. Code k of frame i stands in row
`i + delays[k]`, so a group is drawn knowing the earlier ones of its frame. Rows before a group's
first code hold the begin code, rows after its last one the end code.
"""

import torch


def delayed(frames: torch.Tensor, delays: tuple[int, ...], begin: int, end: int) -> torch.Tensor:
    """The rows of a whole stream, its last one (all end codes) included.

    Args:
        frames: Integer [n, groups].
        delays: Of each group; at least 0.
        begin: The begin code.
        end: The end code.

    Returns:
        [n + max(delays) + 1, groups], of the same type.
    """
    count = len(frames)
    rows = torch.arange(count + max(delays) + 1, device=frames.device)
    source = rows[:, None] - torch.tensor(delays, device=frames.device)
    padded = torch.cat([frames, frames.new_full((1, frames.shape[1]), end)])
    gathered = padded.gather(0, source.clamp(0, count))
    return torch.where(source < 0, begin, gathered)


def undelayed(rows: torch.Tensor, delays: tuple[int, ...]) -> torch.Tensor:
    """The frames whose codes are all there, integer [n - max(delays), groups] (or none of them).

    Args:
        rows: Integer [n, groups], without the row of end codes.
        delays: Of each group.
    """
    count = max(0, len(rows) - max(delays))
    return torch.stack([rows[d : d + count, k] for k, d in enumerate(delays)], dim=1)
