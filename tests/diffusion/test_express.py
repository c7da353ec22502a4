# SPDX-License-Identifier: Apache-2.0
"""What short requests may cost long ones is bounded, whatever comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diffusion.simulator import METHODS
from vllm_omni.diffusion.calls import Call
from vllm_omni.diffusion.express import Express
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.policy import Policy

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]


def call(whole_s: float, priority: int = 0) -> Call:
    made = Call(None, METHODS["denoise"], (), {}, Job(priority))  # type: ignore[arg-type]
    made.whole_s = whole_s
    return made


SHORT, LONG = call(1.0), call(4.0)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans()), max_size=60),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1.0),
)
def test_what_is_lent_is_bounded(
    forwards: list[tuple[float, bool]], burst_s: float, share: float
) -> None:
    express = Express(Policy(express_burst_s=burst_s, express_share=share))
    lent = other = longest = 0.0
    for seconds, wanted in forwards:
        early = wanted and bool(express.shorter([SHORT], LONG))
        express.ran(seconds, early)
        lent += seconds if early else 0.0
        other += 0.0 if early else seconds
        longest = max(longest, seconds)
        assert lent <= burst_s + share * other + longest + 1e-6


def test_who_is_much_longer() -> None:
    express = Express(Policy(much=4.0))
    assert express.shorter([SHORT], LONG) == [SHORT]
    assert express.longer([LONG], SHORT) == [LONG]
    comparable, unknown, more_urgent = call(3.9), call(0.0), call(1.0, priority=-1)
    assert express.longer([comparable, unknown], SHORT) == []
    assert express.shorter([comparable, unknown, more_urgent, LONG], LONG) == []
    assert express.longer([LONG], unknown) == []
