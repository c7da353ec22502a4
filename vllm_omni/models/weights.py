# SPDX-License-Identifier: Apache-2.0
"""Helpers for reading checkpoints."""

from collections.abc import Iterable, Iterator, Sequence

import torch

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"
"""The text embedding table of the omni checkpoints, [text vocabulary, thinker hidden size]."""


def copy_rows(
    weights: Iterable[tuple[str, torch.Tensor]],
    name: str,
    ids: Sequence[int],
    out: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a checkpoint's tensors through, copying rows `ids` of tensor `name` into `out`.

    Args:
        weights: (name, tensor) pairs, in any order.
        name: The table whose rows are wanted; it is passed through too.
        ids: Row numbers.
        out: [len(ids), width]; any device and dtype.

    Raises:
        ValueError: `name` was not among the tensors.
    """
    found = False
    for key, tensor in weights:
        if key == name:
            out.copy_(tensor[torch.tensor(ids, device=tensor.device)])
            found = True
        yield key, tensor
    if not found:
        raise ValueError(f"the checkpoint has no tensor {name!r}")
