# SPDX-License-Identifier: Apache-2.0
"""From the rows of an upstream stage, as messages name them, to one row per position."""

from collections.abc import Mapping, Sequence

import torch

from vllm_omni.connectors.base import OmniConnector
from vllm_omni.connectors.serialization import header_of
from vllm_omni.inputs import RowInput

POSITIONS = "positions"
"""Name of the rows that are no input: M-RoPE positions of the upstream prompt."""


class RowReader:
    """Reads what an upstream stage has put into the connector.

    Args:
        connector: Where it is.
        source: Name of the upstream stage.
        target: Name of the stage that reads.
    """

    def __init__(self, connector: OmniConnector, source: str, target: str) -> None:
        self._connector = connector
        self._source = source
        self._target = target

    def read(self, rows: RowInput) -> dict[str, torch.Tensor]:
        """The message's upstream rows, each name's spans joined; names that only some spans have
        (positions come with prompts only) are cut to the spans that have them.

        Raises:
            KeyError: Some are gone, because their request has been aborted.
        """
        parts: dict[str, list[torch.Tensor]] = {}
        for span in rows.spans:
            payload = self._connector.get(self._source, self._target, span.handle.key, span.handle)
            for name, tensor in payload.items():
                parts.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in parts.items()}

    def read_alike(self, messages: Sequence[RowInput]) -> dict[str, torch.Tensor]:
        """Upstream rows of many messages at once, [n, ...] by name; see `layout`."""
        return self._connector.get_inline([rows.spans[0].handle for rows in messages])


def layout(rows: RowInput) -> bytes | None:
    """What messages that `read_alike` can read together have in common.

    These are messages of one position that takes the one row that came inside of them, as decode
    steps make them by the thousand. None: such a message it is not.
    """
    if rows.index != [0] or len(rows.spans) != 1 or rows.spans[0].count != 1:
        return None
    inline = rows.spans[0].handle.inline
    return header_of(inline) if inline else None


def selected(upstream: Mapping[str, torch.Tensor], index: Sequence[int]) -> dict[str, torch.Tensor]:
    """The rows of each position, without M-RoPE positions.

    Args:
        upstream: Rows by name, each [m, ...].
        index: Upstream row of each of n positions.

    Returns:
        Tensors [n, ...]; zeros where the index is -1 or past the rows (which only some have).
    """
    wanted = torch.tensor(index)
    chosen = {}
    for name, rows in upstream.items():
        if name != POSITIONS:
            gathered = rows[wanted.clamp(0, len(rows) - 1)]
            gathered[(wanted < 0) | (wanted >= len(rows))] = 0
            chosen[name] = gathered
    return chosen


def rebase_positions(upstream: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """M-RoPE positions of a prompt that is a selection of upstream rows.

    Positions are compositional: text counts up by one, a picture or sound has a shape of its own
    that begins where the text before it ended. A run of consecutive upstream rows thus keeps its
    shape and moves as a whole; positions without an upstream row count up like text.

    Args:
        upstream: int [n, 3], positions of the upstream prompt (later rows count up).
        index: Upstream row of each position of this prompt, -1 for none.

    Returns:
        int64 [3, len(index)].
    """
    known = upstream.shape[0]
    before = torch.cat([upstream.new_full((1,), -1), upstream.max(dim=1).values.cummax(0).values])
    rows = torch.tensor(index)
    rows[rows >= known] = -1
    positions = torch.empty(3, len(index), dtype=torch.int64)
    following, start = 0, 0
    for stop in _run_ends(rows):
        if rows[start] < 0:
            positions[:, start:stop] = torch.arange(following, following + stop - start)
        else:
            shift = following - int(before[rows[start]]) - 1
            positions[:, start:stop] = upstream[rows[start:stop]].T + shift
        following = max(following, int(positions[:, start:stop].max()) + 1)
        start = stop
    return positions


def _run_ends(rows: torch.Tensor) -> list[int]:
    """Ends of the runs that `rows` consists of: consecutive rows, or all -1."""
    step = rows[1:] - rows[:-1]
    none = rows < 0
    breaks = torch.where(none[1:], ~none[:-1], step != 1) | (none[:-1] & ~none[1:])
    return [int(end) + 1 for end in breaks.nonzero()[:, 0]] + [len(rows)]
