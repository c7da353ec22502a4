# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a stage (`tensor_parallel_size`) do apart, and what they have to agree on.

Every rank runs the same step and keeps the inputs of all requests. Rows that did not come in a
message itself are read once, by the first rank, which hands them to the others; it alone emits.
What was sampled is the first rank's, too: a sum over ranks may be rounded differently on each of
them (vLLM's sum over shared memory begins with a rank's own share), and ranks that sampled
different tokens would be at different texts for good.
"""

from contextlib import suppress
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_omni.ar.row_reading import RowReader
from vllm_omni.inputs import RowInput

_FOUND = "omni-found"
"""Beside the names of rows: they were there."""


class SharedRowReader(RowReader):
    """Reads rows for all ranks of a group, which call it at the same time.

    Args:
        group: Of the ranks.
        place: As `RowReader` takes it.
    """

    def __init__(self, group: GroupCoordinator, *place: Any) -> None:
        super().__init__(*place)
        self._group = group

    def read(self, rows: RowInput) -> dict[str, torch.Tensor]:
        """See `RowReader`; where rows are gone, all ranks get to know it."""
        if all(span.handle.inline for span in rows.spans):
            return super().read(rows)  # they came with the message, which all ranks have
        read: dict[str, Any] = {_FOUND: False}
        if self._group.is_first_rank:
            with suppress(KeyError):
                read = {_FOUND: True, **super().read(rows)}
        shared = self._group.broadcast_tensor_dict(read)
        assert shared is not None
        if not shared.pop(_FOUND):
            raise KeyError(rows.spans)
        return shared


def agree(group: GroupCoordinator, *tensors: torch.Tensor) -> None:
    """Give all ranks of a group the first one's numbers, in place; tensors are contiguous."""
    for tensor in tensors:
        group.broadcast(tensor)
