# SPDX-License-Identifier: Apache-2.0
"""Latency under load, in virtual time: the scheduler against simpler orders."""

import random
from collections.abc import Callable

import pytest

from tests.diffusion.simulator import SCHEDULERS, Clock, Request, percentile, poisson, simulate
from vllm_omni.diffusion.policy import Policy
from vllm_omni.diffusion.scheduler import CallScheduler

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


def lending(burst_s: float) -> Callable[[Clock], CallScheduler]:
    """The scheduler, lending so much device time at once to short requests."""
    return lambda clock: CallScheduler(32, Policy(express_burst_s=burst_s), clock=clock)


LENDING, NOT_LENDING = lending(Policy().express_burst_s), lending(0.0)


def short_among_long(make: Callable[[Clock], CallScheduler], size: int, came_s: float) -> Request:
    """A request of 4 steps that comes while fifteen of 50 steps run."""
    short = Request(came_s, size, 4)
    simulate(make, [*(Request(0.001 * index, size, 50) for index in range(15)), short])
    return short


@pytest.mark.parametrize("size", [256, 512, 1024])
@pytest.mark.parametrize("came_s", [1.0, 2.5])
def test_a_short_request_does_not_pay_for_long_ones(size: int, came_s: float) -> None:
    """Twice as long as alone, and the forward that it finds running."""
    short = short_among_long(LENDING, size, came_s)
    assert short.latency_s < 2 * short.alone_s + 0.1
    assert short.latency_s < 0.8 * short_among_long(NOT_LENDING, size, came_s).latency_s


def test_a_stream_of_short_requests_does_not_stop_long_ones() -> None:
    """More short requests than the device can make: what is lent to them is bounded."""

    def longest(make: Callable[[Clock], CallScheduler]) -> float:
        long = [Request(0.001 * index, 1024, 50) for index in range(4)]
        short = [Request(0.5 + 0.2 * index, 1024, 4) for index in range(300)]
        simulate(make, [*long, *short])
        return max(each.latency_s for each in long)

    policy = Policy()
    lent = policy.express_burst_s + policy.express_share * longest(NOT_LENDING)
    assert longest(LENDING) < longest(NOT_LENDING) + 1.1 * lent


@pytest.mark.parametrize("size", [256, 512, 1024])
def test_lending_costs_little_throughput(size: int) -> None:
    """Sixteen requests at a time of mixed steps take about as long in all."""

    def seconds(make: Callable[[Clock], CallScheduler]) -> float:
        chance = random.Random(3)
        requests = [Request(0.4 * index, size, chance.randint(4, 50)) for index in range(64)]
        simulate(make, requests)
        return max(each.came_s + each.latency_s for each in requests)

    assert seconds(LENDING) < 1.05 * seconds(NOT_LENDING)
