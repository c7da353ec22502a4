# SPDX-License-Identifier: Apache-2.0
"""Routing, stickiness and eviction of a stage's replicas (rows B-01, B-02)."""

import pytest

from tests.engine.fakes import STAGES, FakeReplica
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.errors import StageUnavailableError
from vllm_omni.inputs import RowInput

pytestmark = [pytest.mark.core_model, pytest.mark.cpu, pytest.mark.omni]

ROW = RowInput(spans=[], index=[0], kinds=b"\0")


@pytest.fixture
async def replicas() -> list[FakeReplica]:
    return [FakeReplica() for _ in range(3)]


@pytest.fixture
def pool(replicas: list[FakeReplica]) -> StagePool:
    return StagePool(STAGES[1], 1, replicas)


def load(replica: FakeReplica, count: int) -> None:
    replica.running = {str(i): None for i in range(count)}


@pytest.mark.parametrize(
    ("loads", "chosen"), [((0, 0, 0), 0), ((2, 1, 3), 1), ((1, 1, 0), 2), ((5, 4, 4), 1)]
)
async def test_the_least_loaded_replica_is_chosen(
    pool: StagePool, replicas: list[FakeReplica], loads: tuple[int, ...], chosen: int
) -> None:
    for replica, count in zip(replicas, loads, strict=True):
        load(replica, count)
    assert pool.select_replica_id() == chosen


async def test_requests_spread_over_replicas(pool: StagePool, replicas: list[FakeReplica]) -> None:
    for i in range(6):
        pool.bind(f"r{i}")
        await pool.submit(f"r{i}", None, None)
    assert [replica.load for replica in replicas] == [2, 2, 2]


async def test_a_request_stays_with_its_replica(
    pool: StagePool, replicas: list[FakeReplica]
) -> None:
    load(replicas[0], 1)
    assert pool.bind("r") == 1
    await pool.submit("r", None, None)
    load(replicas[0], 0)
    await pool.update([("r", ROW)])
    await pool.abort(["r"])
    assert replicas[1].updates == [["r"]]
    assert replicas[1].aborted == ["r"]
    assert pool.bound_replica_id("r") is None


async def test_one_update_per_replica_however_many_requests(
    pool: StagePool, replicas: list[FakeReplica]
) -> None:
    for i in range(6):
        pool.bind(f"r{i}")
        await pool.submit(f"r{i}", None, None)
    await pool.update([(f"r{i}", ROW) for i in range(6)] + [("unknown", ROW)])
    assert [replica.updates for replica in replicas] == [
        [["r0", "r3"]],
        [["r1", "r4"]],
        [["r2", "r5"]],
    ]


async def test_an_evicted_replica_leaves_a_hole(
    pool: StagePool, replicas: list[FakeReplica]
) -> None:
    pool.bind("r")
    evicted = pool.evict_replica(0)
    assert evicted is not None
    assert pool.live_replica_ids == [1, 2], "before it is shut down"
    await evicted
    assert pool.evict_replica(0) is None
    assert replicas[0].shutdowns == [0]
    assert (pool.num_replicas, pool.live_num_replicas) == (3, 2)
    with pytest.raises(StageUnavailableError, match="stage 1 replica 0 is not attached"):
        pool.replica(0)
    assert pool.select_replica_id() == 1
    assert pool.requests_on(0) == []
    await pool.abort(["r"])
    assert replicas[0].aborted == []


@pytest.mark.parametrize("replica_id", [-1, 3])
def test_only_a_replica_can_be_evicted(pool: StagePool, replica_id: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        pool.evict_replica(replica_id)


async def test_nothing_can_be_chosen_when_all_are_gone(pool: StagePool) -> None:
    for replica_id in range(3):
        pool.evict_replica(replica_id)
    with pytest.raises(StageUnavailableError, match="stage 1 has no live replicas"):
        pool.bind("r")
    assert pool.bound_replica_id("r") is None


async def test_shutdown_ends_each_replica_once(
    pool: StagePool, replicas: list[FakeReplica]
) -> None:
    evicted = pool.evict_replica(1)
    assert evicted is not None
    await evicted
    pool.shutdown(2.0)
    pool.shutdown(2.0)
    assert [replica.shutdowns for replica in replicas] == [[2.0], [0], [2.0]]
