# SPDX-License-Identifier: Apache-2.0
"""What the call scheduler promises, whatever comes in whatever order (A-40 to A-43)."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diffusion.simulator import METHODS, Clock
from vllm_omni.diffusion.calls import Batch, Call
from vllm_omni.diffusion.cost import CostModel
from vllm_omni.diffusion.jobs import Job
from vllm_omni.diffusion.policy import Policy
from vllm_omni.diffusion.scheduler import CallScheduler

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.diffusion]

NAMES = sorted(METHODS)


def make_call(
    job: Job, method: str = "denoise", signature: int = 0, work: int = 1, length: int = 0
) -> Call:
    call = Call(None, METHODS[method], (), {}, job)  # type: ignore[arg-type]
    call.signature, call.work, call.length = signature, work, length
    return call


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[dict[str, int | str]], float]]:
    """Between forwards: calls that are parked, and seconds that the next forward takes."""
    call = st.fixed_dictionaries(
        {
            "method": st.sampled_from(NAMES),
            "signature": st.integers(0, 2),
            "work": st.integers(1, 50),
            "length": st.sampled_from([0, 0, 5, 9, 30]),
            "priority": st.integers(-1, 1),
        }
    )
    return draw(st.lists(st.tuples(st.lists(call, max_size=6), st.floats(0.01, 2.0)), max_size=25))


def play(
    scheduler: CallScheduler,
    clock: Clock,
    script: list[tuple[list[dict[str, int | str]], float]],
    look: Callable[[list[Call], list[Call], float], None],
) -> None:
    """Follow the script, then run what is left; `look` sees (parked before, batch, seconds)."""
    parked: list[Call] = []
    for arrivals, took in [*script, *[([], 0.5)] * 200]:
        for each in arrivals:
            given_call = dict(each)
            job = scheduler.begin_job(given_call.pop("priority"))  # type: ignore[arg-type]
            given_call["signature"] = (given_call["signature"], bool(given_call["length"]))  # type: ignore[assignment]
            call = make_call(job, **given_call)  # type: ignore[arg-type]
            scheduler.add(call)
            parked.append(call)
        assert len(scheduler) == len(parked)
        batch = scheduler.select()
        assert bool(batch) == bool(parked)
        if batch:
            look(list(parked), batch, took)
            parked = [call for call in parked if call not in batch]
            clock.now += took
            scheduler.ran(Batch.of(batch), took)
    assert not parked and not scheduler.select()


@settings(deadline=None, max_examples=60)
@given(steps(), st.integers(1, 5), st.sampled_from([0.0, 3.0, math.inf]))
def test_every_call_runs_once_with_its_like(
    script: list[tuple[list[dict[str, int | str]], float]], max_batch: int, patience_s: float
) -> None:
    clock = Clock()
    scheduler = CallScheduler(max_batch, Policy(patience_s=patience_s), clock=clock)
    runs: Counter[Call] = Counter()

    def look(parked: list[Call], batch: list[Call], took: float) -> None:
        runs.update(batch)
        assert len({call.group for call in batch}) == 1
        assert len(batch) <= max_batch
        assert set(batch) <= set(parked)

    play(scheduler, clock, script, look)
    assert set(runs.values()) <= {1}
    assert runs.total() == sum(len(arrivals) for arrivals, _ in script)


@settings(deadline=None, max_examples=60)
@given(steps(), st.integers(1, 5))
def test_lower_priorities_go_first(
    script: list[tuple[list[dict[str, int | str]], float]], max_batch: int
) -> None:
    clock = Clock()
    scheduler = CallScheduler(max_batch, Policy(patience_s=math.inf), clock=clock)

    def look(parked: list[Call], batch: list[Call], took: float) -> None:
        assert batch[0].job.priority == min(call.job.priority for call in parked)
        left_behind = [c for c in parked if c.group == batch[0].group and c not in batch]
        if left_behind and not batch[0].length:
            first = min(call.job.priority for call in left_behind)
            assert first >= max(call.job.priority for call in batch)

    play(scheduler, clock, script, look)


@settings(deadline=None, max_examples=60)
@given(steps(), st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 3.0]))
def test_waiting_is_bounded(
    script: list[tuple[list[dict[str, int | str]], float]],
    max_batch: int,
    every: int,
    patience_s: float,
) -> None:
    """Past its patience, a call waits for older calls only, each of which gets a turn in time."""
    clock = Clock()
    policy = Policy(patience_s=patience_s, overdue_every=every)
    scheduler = CallScheduler(max_batch, policy, clock=clock)
    overdue_for: Counter[Call] = Counter()
    older: dict[Call, int] = {}

    def look(parked: list[Call], batch: list[Call], took: float) -> None:
        for position, call in enumerate(parked):
            older.setdefault(call, position)
            if call not in batch and clock.now - call.parked_s >= patience_s:
                overdue_for[call] += 1
                assert overdue_for[call] <= every * (older[call] + 1)

    play(scheduler, clock, script, look)


def drive(scheduler: CallScheduler, cost: Callable[[int], float], forwards: int) -> list[int]:
    """Sizes of the batches while 64 calls of work 100 wait all the time."""
    sizes = []
    jobs = [Job() for _ in range(64)]
    for job in jobs:
        scheduler.add(make_call(job, work=100))
    for _ in range(forwards):
        batch = scheduler.select()
        sizes.append(len(batch))
        scheduler.ran(Batch.of(batch), cost(len(batch)))
        for call in batch:
            scheduler.add(make_call(call.job, work=100))
    return sizes


@pytest.mark.parametrize(
    ("cost", "usual"),
    [
        (lambda calls: max(0.2, 0.2 * calls / 8), range(8, 16)),
        (lambda calls: 0.2 * calls, range(1, 2)),
        (lambda calls: 0.2, range(32, 33)),
        (lambda calls: 0.0002 * calls, range(32, 33)),
    ],
    ids=["full at 8", "full at 1", "never full", "too short to matter"],
)
def test_batches_grow_until_the_device_is_full(cost: Callable[[int], float], usual: range) -> None:
    sizes = drive(CallScheduler(32), cost, 100)[20:]
    assert sum(size in usual for size in sizes) >= 75
    assert sum(size > 2 * usual[-1] for size in sizes) <= 5


def test_a_new_size_is_approached_step_by_step() -> None:
    """Thirty large images are not put into one forward before it is known what two cost."""
    scheduler = CallScheduler(32)
    drive(scheduler, lambda calls: 0.1 * calls, 10)
    for call in list(scheduler._calls):
        scheduler.discard(call)
    for _ in range(30):
        scheduler.add(make_call(Job(), signature=1, work=10_000))
    sizes = []
    for _ in range(3):
        batch = scheduler.select()
        sizes.append(len(batch))
        scheduler.ran(Batch.of(batch), len(batch) * 10.0)
    assert sizes[0] <= 1 and all(after <= 2 * before for before, after in pairwise(sizes))


def test_no_memory_is_remembered() -> None:
    scheduler = CallScheduler(32, cost=CostModel(math.inf))
    jobs = [Job() for _ in range(16)]
    for job in jobs:
        scheduler.add(make_call(job, work=100))
    batch = scheduler.select()
    assert len(batch) == 16
    scheduler.ran_out_of_memory(Batch.of(batch))
    for job in jobs:
        scheduler.add(make_call(job, work=100))
    assert [len(scheduler.select()) for _ in range(2)] == [8, 8]
    scheduler.add(make_call(Job(), work=10_000))
    assert len(scheduler.select()) == 1, "a call that is larger still runs, alone"
    scheduler.add(make_call(Job(), "decode", work=900))
    scheduler.add(make_call(Job(), "decode", work=900))
    assert len(scheduler.select()) == 2, "the limit is one component's"


def test_shortest_remaining_work_first() -> None:
    """By what programs say; else by what other requests did."""
    scheduler = CallScheduler(1, Policy(ageing=0.0, patience_s=math.inf))
    said = {}
    for calls in (30, 4, 12):
        job = scheduler.begin_job(0)
        job.expect(METHODS["denoise"], calls)
        said[job] = calls
    silent = scheduler.begin_job(0)
    for count in (7, 9):
        done = Job()
        for _ in range(count):
            done.count(METHODS["denoise"])
        scheduler.end_job(done)
    for _ in range(2):  # what a call costs
        scheduler.add(make_call(silent))
        scheduler.ran(Batch.of(scheduler.select()), 1.0)
    # The silent one has made two of about eight.
    for job in (*said, silent):
        scheduler.add(make_call(job))
    order = [scheduler.select()[0].job for _ in range(4)]
    assert [said.get(job, "silent") for job in order] == [4, "silent", 12, 30]


def test_age_makes_up_for_work() -> None:
    """A request is not overtaken by those that come later than its remaining work / ageing."""
    clock = Clock()
    scheduler = CallScheduler(
        1, Policy(ageing=0.5, patience_s=math.inf, express_burst_s=0.0), clock=clock
    )
    for _ in range(2):
        scheduler.add(make_call(Job()))
        scheduler.ran(Batch.of(scheduler.select()), 1.0)
    long = scheduler.begin_job(0)
    long.expect(METHODS["denoise"], 10)  # 10 s
    scheduler.add(make_call(long))
    shorts = []
    for clock.now in (0.0, 10.0, 30.0):
        short = scheduler.begin_job(0)
        short.expect(METHODS["denoise"], 1)
        scheduler.add(make_call(short))
        shorts.append(short)
    order = [scheduler.select()[0].job for _ in range(4)]
    assert order == [shorts[0], shorts[1], long, shorts[2]]


@pytest.mark.parametrize("share", ["decode", "encode"])
def test_components_take_turns(share: str) -> None:
    """Neither starves, whichever has the more urgent calls."""
    scheduler = CallScheduler(1, Policy(patience_s=math.inf))
    seconds = {"denoise": 1.0, share: 3.0}
    for method in seconds:
        for _ in range(200):
            scheduler.add(make_call(Job(), method))
    spent: Counter[str] = Counter()
    for _ in range(100):
        batch = scheduler.select()
        method = batch[0].collator.function.__name__
        spent[method] += seconds[method]  # type: ignore[assignment]
        scheduler.ran(Batch.of(batch), seconds[method])
    for method in seconds:
        assert spent[method] >= 0.2 * sum(spent.values()), spent


def test_a_thousand_calls_of_a_thousand_kinds() -> None:
    """What is discarded is gone, and everything else still runs."""
    scheduler = CallScheduler(32)
    calls = [make_call(Job(), signature=index) for index in range(1000)]
    for call in calls:
        scheduler.add(call)
    for call in calls[::2]:
        scheduler.discard(call)
        scheduler.discard(call)
    ran = [call for _ in range(500) for call in scheduler.select()]
    assert sorted(ran, key=lambda call: call.serial) == calls[1::2]
    assert len(scheduler) == 0 and scheduler.select() == []


def test_batches_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CallScheduler(0)


@pytest.mark.parametrize(("together_s", "expected"), [(1.5, True), (2.5, False)])
def test_a_guess_runs_along_if_that_is_faster_than_by_itself(
    together_s: float, expected: bool
) -> None:
    """A common forward may need a mask that calls of one length do without (seen on an H200)."""
    scheduler = CallScheduler(8, cost=CostModel(short_s=10))  # no forward is too long
    job = scheduler.begin_job(0)
    made = []
    for seconds, company in [(1.0, False)] * 3 + [(together_s, True)] * 2 + [(1.0, True)] * 40:
        scheduler.add(make_call(job, work=100))
        chosen = scheduler.select()
        more = scheduler.company(chosen, lambda call: make_call(job, work=100)) if company else []
        made.append(bool(more))
        scheduler.ran(Batch.of([*chosen, *more]), together_s if more else seconds)
    assert made[3]  # it is tried
    assert (
        sum(made[-40:]) == 40 if expected else 1 <= sum(made[-40:]) <= 3
    )  # and again, now and then
