# SPDX-License-Identifier: Apache-2.0
"""Latency under load, in virtual time: the scheduler against simpler orders."""

import pytest

from tests.diffusion.simulator import SCHEDULERS, Request, percentile, poisson, simulate

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

OURS = "shortest remaining first"
BASELINES = ("first come, first served", "round robin")


def latencies(name: str, rate: float, seed: int) -> list[float]:
    requests = poisson(rate, 300, seed)
    simulate(SCHEDULERS[name], requests, seed)
    return [request.latency_s for request in requests]


@pytest.mark.parametrize("rate", [2.0, 4.0])
def test_mean_and_p99_against_baselines(rate: float) -> None:
    """At a moderate load and near what the device can do (about 4.5 a second)."""
    made = {
        name: [each for seed in range(2) for each in latencies(name, rate, seed)]
        for name in (OURS, *BASELINES)
    }
    mean = {name: sum(values) / len(values) for name, values in made.items()}
    p99 = {name: percentile(values, 99) for name, values in made.items()}
    for baseline in BASELINES:
        assert mean[OURS] < 0.95 * mean[baseline], mean
        assert p99[OURS] < 1.3 * p99[baseline], p99


def test_it_is_the_same_every_time() -> None:
    assert latencies(OURS, 3.0, 5) == latencies(OURS, 3.0, 5)


def test_a_large_image_neither_stalls_small_ones_nor_starves() -> None:
    """One image of 1024 px and 50 steps, under a steady stream of small ones."""
    small = [Request(0.05 * index, 256, 4) for index in range(400)]
    large = Request(0.01, 1024, 50)
    alone = [Request(each.came_s, each.size, each.steps) for each in small]
    simulate(SCHEDULERS[OURS], alone)
    simulate(SCHEDULERS[OURS], sorted([*small, large], key=lambda each: each.came_s))
    with_large, without = (
        percentile([each.latency_s for each in requests], 50) for requests in (small, alone)
    )
    assert with_large < 2 * without
    assert large.latency_s < 15 * large.alone_s


def test_a_lower_priority_gives_way() -> None:
    requests = poisson(4.5, 200, 1)
    for index, request in enumerate(requests):
        request.priority = -1 if index % 4 == 0 else 0
    simulate(SCHEDULERS[OURS], requests)
    slowdown = {
        priority: percentile(
            [r.latency_s / r.alone_s for r in requests if r.priority == priority], 50
        )
        for priority in (-1, 0)
    }
    assert slowdown[-1] < 0.7 * slowdown[0]
