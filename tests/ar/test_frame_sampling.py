# SPDX-License-Identifier: Apache-2.0
"""How the further codes of a frame are drawn, given a talker's sampling parameters (B-M58)."""

from typing import Any

import pytest
from vllm import SamplingParams

from vllm_omni.ar.wire import FrameSampling, frame_sampling

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]


@pytest.mark.parametrize(
    ("given", "frames", "expected"),
    [
        ({"temperature": 0.3, "top_k": 7, "top_p": 0.5}, None, (0.3, 7, 0.5)),
        ({"temperature": 0.3, "top_k": -1}, None, (0.3, 0, 1.0)),
        ({"temperature": 0.3, "top_k": 7}, {"temperature": 0.9, "top_k": 50}, (0.9, 50, 0.8)),
        ({"temperature": 0.3, "top_k": 7}, {}, (1.0, 50, 0.8)),
        ({"temperature": 0, "top_k": 7}, {"temperature": 0.9}, (0.0, 0, 1.0)),
    ],
    ids=["as the first", "all codes", "its own", "its own defaults", "greedy"],
)
def test_as_the_first_code_unless_said_otherwise(
    given: dict[str, Any], frames: dict[str, Any] | None, expected: tuple[float, int, float]
) -> None:
    extra = None if frames is None else {"subtalker_sampling_params": frames}
    params = SamplingParams(**given, seed=5, extra_args=extra)
    assert frame_sampling(params) == FrameSampling(*expected, seed=5)
