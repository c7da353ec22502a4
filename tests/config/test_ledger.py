# SPDX-License-Identifier: Apache-2.0
"""What devices have to hold, and which deployments are refused for it (issue 6; USERS.md, start-up
and memory)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_omni.config.devices import Host
from vllm_omni.config.ledger import GIB, SLACK, Claim, DeviceMemory, Ledger
from vllm_omni.config.plan import StagePlan
from vllm_omni.config.weight_sizes import weight_bytes
from vllm_omni.engine import launcher
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.errors import OmniConfigError

from .conftest import GPUS, SINGLE, Planner

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

TOTAL = 80 * GIB
Weights = Callable[[StagePlan], int]


def stages(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"stages": [{"stage_id": i, **entry} for i, entry in enumerate(entries)]}


SHARED = stages(
    {"devices": "0", "gpu_memory_utilization": 0.5},
    {"devices": "0", "gpu_memory_utilization": 0.3},
    {"devices": "1"},
)


def check(
    plan: Planner, deploy: dict[str, Any], free: float = 80, weights: Weights = lambda stage: 0
) -> list[str]:
    resolved = plan(deploy, host=GPUS)
    memory = DeviceMemory(TOTAL, int(free * GIB))
    return list(Ledger.of(resolved.stages, weights).check_memory(lambda device: memory))


def test_what_fits_is_listed(plan: Planner) -> None:
    first, second = check(plan, SHARED, weights=lambda s: GIB * (s.name == "decoder"))
    assert first == (
        "device 0: 80.0 GiB of 80.0 GiB free; stage 0 (thinker) 0.5 = 40.0 GiB, "
        "stage 1 (talker) 0.3 = 24.0 GiB"
    )
    assert second.endswith("stage 2 (decoder) 1.0 GiB of weights")


@pytest.mark.parametrize(
    ("deploy", "free", "weights", "says"),
    [
        (SHARED, 60, {}, ["60.0 GiB of its 80.0 GiB are free", "want 64.0 GiB", "(talker) 0.3",
                          "lower gpu_memory_utilization of stage 1", "stages[1]", "`devices`"]),
        (SHARED, 80, {"thinker": 60 * GIB}, ["weights of stage 0 (thinker) take 60.0 GiB",
                                             "gpu_memory_utilization = 0.5", "above 0.68"]),
        (SHARED, 80, {"decoder": 75 * GIB}, ["device 1", "(decoder) 75.0 GiB of weights",
                                             "states no gpu_memory_utilization"]),
        (SHARED, 80, {"decoder": 99 * GIB}, ["device 1", "a larger device"]),
        (stages({"devices": "0", "gpu_memory_utilization": 0.5},
                {"devices": "0", "kv_cache_memory_bytes": GIB}, {"devices": "1"}), 80, {},
         ["stage 1 (talker) does not start where less than 0.92", "vLLM's default"]),
        (stages({"devices": "0,0", "num_replicas": 2, "gpu_memory_utilization": 0.4},
                {"devices": "1"}, {"devices": "1"}), 50, {}, ["stage 0 (thinker) replica 1 0.4"]),
        (stages({"devices": "0,1", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
                {"devices": "2"}, {"devices": "2"}), 80, {"thinker": 100 * GIB},
         ["take 50.0 GiB"]),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    plan: Planner, deploy: dict[str, Any], free: float, weights: dict[str, int], says: list[str]
) -> None:
    with pytest.raises(OmniConfigError) as caught:
        check(plan, deploy, free, lambda stage: weights.get(stage.name, 0))
    assert "\n" not in str(caught.value)
    for text in says:
        assert text in str(caught.value)


def test_tensor_parallel_ranks_share_weights(plan: Planner) -> None:
    deploy = stages(
        {"devices": "0,1", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
        {"devices": "2"},
        {"devices": "2"},
    )
    assert len(check(plan, deploy, weights=lambda s: 60 * GIB * (s.name == "thinker"))) == 3


def test_ranks_of_replicas_claim_a_device_each(plan: Planner) -> None:
    """Two replicas of two ranks are four devices; what else is on one of them has to fit there."""
    thinker = {"devices": "0,1,2,3", "tensor_parallel_size": 2, "num_replicas": 2}
    thinker["gpu_memory_utilization"] = 0.7
    weights = {"thinker": 100 * GIB}.get
    fits = stages(thinker, {"devices": "3", "gpu_memory_utilization": 0.2}, {"devices": "0"})
    lines = check(plan, fits, weights=lambda stage: weights(stage.name, 0))
    assert [line.split(":")[0] for line in lines] == [f"device {i}" for i in range(4)]
    assert all(f"(thinker) replica {i // 2} 0.7" in line for i, line in enumerate(lines))
    crowded = stages(thinker, {"devices": "3", "gpu_memory_utilization": 0.4}, {"devices": "0"})
    with pytest.raises(OmniConfigError, match=r"device 3: .* 1\.1, more than 1: .* replica 1 0\.7"):
        check(plan, crowded)


@given(
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    free=st.integers(0, TOTAL),
)
def test_shares_are_refused_exactly_where_they_do_not_fit(shares: list[float], free: int) -> None:
    claims = tuple(
        Claim(stage=f"stage {i}", share=share, source="x") for i, share in enumerate(shares)
    )
    ledger = Ledger({"0": claims})
    beyond = sum(shares) * TOTAL - free - SLACK * TOTAL
    if abs(beyond) < 1024:
        return
    try:
        list(ledger.check_memory(lambda device: DeviceMemory(TOTAL, free)))
        refused = False
    except OmniConfigError:
        refused = True
    assert refused == (beyond > 0)


def test_nobody_knows_the_memory(plan: Planner) -> None:
    resolved = plan(SHARED, host=GPUS)
    assert list(Ledger.of(resolved.stages).check_memory(lambda device: None)) == []


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 3 * 100 * 2 + 100),  # float32 is loaded as bfloat16 unless it is asked for
        ({"dtype": "float32"}, 3 * 100 * 2 + 100 + 200 * 1),
        ({"load_format": "dummy"}, 0),
        ({"quantization": "fp8"}, 0),
    ],
)
def test_weights_are_measured_unread(
    plan: Planner, checkpoint: str, settings: dict[str, Any], size: int
) -> None:
    save_file(
        {
            "a": torch.zeros(100, dtype=torch.float32),
            "b": torch.zeros(10, 20, dtype=torch.bfloat16),
            "c": torch.zeros(100, dtype=torch.uint8),
        },
        f"{checkpoint}/model.safetensors",
    )
    resolved = plan(stages({"devices": "0", **settings}), host=GPUS, pipeline=SINGLE)
    assert weight_bytes(resolved.pipeline, resolved.stages[0]) == size
    Path(checkpoint, "model.safetensors").write_bytes(b"damaged")
    assert weight_bytes(resolved.pipeline, resolved.stages[0]) == 0


@pytest.fixture
def model(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("qwen3_tts_custom_voice"))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a machine with a GPU of 80 GiB, 8 of which are free."""
    memory = DeviceMemory(TOTAL, 8 * GIB)
    monkeypatch.setattr(Host, "current", classmethod(lambda cls: Host("cuda", 1)))
    monkeypatch.setattr(launcher, "device_memory", lambda platform: lambda device: memory)


REFUSED = re.compile(
    r"device 0: 8\.0 GiB of its 80\.0 GiB are free, .*\(qwen3_tts\) 0\.6 = 48\.0 GiB"
)


def test_omni_refuses(one_gpu: None, model: str) -> None:
    with pytest.raises(OmniConfigError, match=REFUSED):
        Omni(model)


def test_the_server_refuses(
    one_gpu: None,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm-omni", "serve", model, "--omni", "--port=0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2, "as for every wrong setting"
    assert REFUSED.search(capsys.readouterr().err)
