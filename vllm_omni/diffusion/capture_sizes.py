# SPDX-License-Identifier: Apache-2.0
"""Lengths that codec decoders have CUDA graphs for, as a deploy file may give them."""

from collections.abc import Mapping
from typing import Any

from vllm_omni.diffusion.rules import GRAPH_LENGTHS
from vllm_omni.errors import OmniConfigError

KEY = "decode_cudagraph_capture_sizes"
"""In a connector's `extra`: a list, a text of numbers between commas, or one number."""


def capture_lengths(extra: Mapping[str, Any]) -> tuple[int, ...]:
    """In frames, ascending.

    Raises:
        OmniConfigError: They are no numbers of frames.
    """
    given = extra.get(KEY)
    if given is None:
        return GRAPH_LENGTHS
    parts = given.split(",") if isinstance(given, str) else given
    try:
        lengths = {int(part) for part in (parts if isinstance(parts, list) else [parts])}
    except (TypeError, ValueError):
        lengths = set()
    if not lengths or min(lengths) < 1:
        raise OmniConfigError(f"{KEY}: numbers of frames from 1 are expected, got {given!r}")
    return tuple(sorted(lengths))
