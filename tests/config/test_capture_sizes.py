# SPDX-License-Identifier: Apache-2.0
"""Lengths of decoder graphs, as a deploy file gives them (A-68)."""

import re
from typing import Any

import pytest

from vllm_omni.errors import OmniConfigError

from .conftest import Planner

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

SIZES = "decode_cudagraph_capture_sizes"


def graph_lengths(plan: Planner, given: Any) -> tuple[int, ...] | None:
    shm = {"name": "SharedMemoryConnector", "extra": {SIZES: given}}
    edge = {"stage_id": 2, "input_connectors": {"from_stage_1": "shm"}}
    resolved = plan({"connectors": {"shm": shm}, "stages": [edge]})
    return resolved.connector("talker", "decoder").graph_lengths


@pytest.mark.parametrize("given", [[8, 4, 8], (4, 8), "4, 8", "8,4", ["4", 8]])
def test_lengths_of_decoder_graphs(plan: Planner, given: Any) -> None:
    assert graph_lengths(plan, given) == (4, 8)
    assert graph_lengths(plan, 16) == (16,)
    assert graph_lengths(plan, None) is None


BAD_SIZES = ([], "", "4,", "four", "４", "+4", [0], -1, {"a": 1}, [None], True, [2.0], 8.5, 1 << 40)
ENDLESS_SIZES = (float("inf"), [float("nan")], "9" * 5000, [4097], [*range(1, 66)])


@pytest.mark.parametrize("given", [*BAD_SIZES, *ENDLESS_SIZES])
def test_lengths_that_no_decoder_has(plan: Planner, given: Any) -> None:
    """They are told before anything starts, on a machine without graphs too."""
    place = f"connectors.shm.extra.{SIZES} = "
    with pytest.raises(OmniConfigError, match=f"{re.escape(place)}.*: should be 1 to 64 numbers"):
        graph_lengths(plan, given)
