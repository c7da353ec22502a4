# SPDX-License-Identifier: Apache-2.0
"""Random numbers of batched requests depend on nothing but the request, and are random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.models.noise import Noise

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.tts]

INT64 = st.integers(-(2**63), 2**63 - 1)
PAIRS = st.lists(st.tuples(INT64, st.integers(0, 2**20)), min_size=1, max_size=5)


def noise(pairs: list[tuple[int, int]]) -> Noise:
    seeds, positions = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    return Noise(seeds, positions)


@settings(max_examples=50, deadline=None)
@given(PAIRS, st.integers(0, 3))
def test_a_request_draws_the_same_in_any_company(pairs: list[tuple[int, int]], stream: int) -> None:
    together = noise(pairs).uniform(3, 7, stream=stream)
    assert together.dtype == torch.float32
    assert together.shape == (len(pairs), 3, 7)
    for pair, drawn in zip(pairs, together, strict=True):
        assert torch.equal(noise([pair]).uniform(3, 7, stream=stream)[0], drawn)


def test_seeds_positions_and_streams_are_different_draws() -> None:
    pairs = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 0), (-1, 0)]
    draws = torch.cat([noise(pairs).uniform(1000, stream=stream) for stream in (0, 1)])
    correlations = torch.corrcoef(draws) - torch.eye(len(draws))
    # Of independent draws, each is about 1 / sqrt(1000) = 0.03.
    assert correlations.abs().max() < 0.15


def test_the_distributions() -> None:
    """Of 400,000 numbers; a mean is within 5 of its standard errors (at most 0.0016)."""
    drawn = noise([(7, position) for position in range(40)])
    uniform = drawn.uniform(10_000)
    assert uniform.min() > 0 and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.003
    counts = torch.histc(uniform, 100, 0, 1)
    # Chi-squared of 99 degrees of freedom: 99 on average, above 170 once in 10,000.
    assert ((counts - 4000) ** 2 / 4000).sum() < 170
    exponential = drawn.exponential(10_000)
    assert abs(exponential.mean() - 1) < 0.008 and abs(exponential.var() - 1) < 0.025
    normal = drawn.normal(10_000)
    assert normal.isfinite().all()
    assert abs(normal.mean()) < 0.008 and abs(normal.var() - 1) < 0.012
    assert abs((normal**4).mean() - 3) < 0.08
