# SPDX-License-Identifier: Apache-2.0
"""Each key can be set at each level, and a higher level wins over all lower ones."""

from typing import Any

import pytest

from vllm_omni.config.plan import DeploymentPlan, StagePlan

from .conftest import GPUS, Planner

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

LEVELS = ("wide", "stage", "platform", "file_override", "flag", "override")
"""Low to high."""

AR_KEYS: dict[str, list[Any]] = {
    "max_num_seqs": [1, 2, 3, 4, 5],
    "gpu_memory_utilization": [0.11, 0.12, 0.13, 0.14, 0.15],
    "max_num_batched_tokens": [101, 102, 103, 104, 105],
    "max_model_len": [11, 12, 13, 14, 15],
    "kv_cache_memory_bytes": [1, 2, 3, 4, 5],
    "enforce_eager": [True, False, True, False, True],
    "load_format": ["a", "b", "c", "d", "e"],
    "revision": ["a", "b", "c", "d", "e"],
    "seed": [1, 2, 3, 4, 5],
    "async_scheduling": [True, False, True, False, True],
    "block_size": [16, 32, 64, 128, 256],
    "enable_expert_parallel": [True, False, True, False, True],
    "hf_overrides": [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 5}],
}
WIDE_KEYS: dict[str, list[Any]] = {
    "dtype": ["float32", "bfloat16", "float16", "half", "float", "auto"],
    "trust_remote_code": [True, False, True, False, True, False],
    "enable_prefix_caching": [True, False, True, False, True, False],
    "enable_chunked_prefill": [True, False, True, False, True, False],
    "quantization": ["a", "b", "c", "d", "e", "f"],
    "distributed_executor_backend": ["mp", "uni", "ray", "mp", "uni", "ray"],
}


def cases() -> list[Any]:
    keys = {key: dict(zip(LEVELS[1:], v, strict=True)) for key, v in AR_KEYS.items()}
    keys |= {key: dict(zip(LEVELS, v, strict=True)) for key, v in WIDE_KEYS.items()}
    return [
        pytest.param(key, values, level, id=f"{key}-{level}")
        for key, values in keys.items()
        for level in values
    ]


def plan_up_to(plan: Planner, key: str, values: dict[str, Any], level: str) -> DeploymentPlan:
    """The key is set at this level and all below it."""
    order = [name for name in LEVELS if name in values]
    below = order[: order.index(level) + 1]
    entry = {"stage_id": 0}
    deploy: dict[str, Any] = {"stages": [{**entry}]}
    kwargs: dict[str, Any] = {}
    for name in below:
        setting = {key: values[name]}
        match name:
            case "wide":
                deploy |= setting
            case "stage":
                deploy["stages"][0] |= setting
            case "platform":
                deploy["platforms"] = {"cuda": {"stages": [entry | setting]}}
            case "file_override":
                deploy["stage_overrides"] = {"thinker": setting}
            case "flag":
                kwargs["cli"] = setting
            case "override":
                kwargs["stage_overrides"] = {"0": setting}
    others = {"gpu_memory_utilization": 0.05}  # vLLM's own share for the thinker fits beside it
    kwargs.setdefault("stage_overrides", {})
    kwargs["stage_overrides"] = {"talker": others, **kwargs["stage_overrides"]}
    return plan(deploy, host=GPUS, **kwargs)


@pytest.mark.parametrize(("key", "values", "level"), cases())
def test_the_highest_level_wins(
    plan: Planner, key: str, values: dict[str, Any], level: str
) -> None:
    stage = plan_up_to(plan, key, values, level).stages[0]
    assert stage.engine_args[key] == values[level]


def setting_of(stage: StagePlan, key: str) -> Any:
    return {
        "devices": stage.devices,
        "num_replicas": stage.num_replicas,
        "env": stage.env,
    }[key]


@pytest.mark.parametrize(
    ("key", "values", "results"),
    [
        ("devices", ["0", "1", "2", "3"], [(("0",),), (("1",),), (("2",),), (("3",),)]),
        ("env", [{"A": str(i)} for i in range(4)], [{"A": str(i)} for i in range(4)]),
    ],
)
def test_placement_follows_the_same_order(
    plan: Planner, key: str, values: list[Any], results: list[Any]
) -> None:
    levels = ("stage", "platform", "file_override", "override")
    by_level = dict(zip(levels, values, strict=True))
    for level, result in zip(levels, results, strict=True):
        assert setting_of(plan_up_to(plan, key, by_level, level).stages[0], key) == result


def test_sampling_defaults_are_merged_through_all_levels(plan: Planner) -> None:
    deploy = {
        "stages": [
            {
                "stage_id": 1,
                "default_sampling_params": {"top_k": 1, "top_p": 0.1, "seed": 1, "max_tokens": 1},
            }
        ],
        "stage_overrides": {"talker": {"default_sampling_params": {"top_p": 0.2, "seed": 2}}},
    }
    resolved = plan(
        deploy,
        default_sampling_params='{"1": {"seed": 3, "max_tokens": 3}}',
        stage_overrides={"talker": {"default_sampling_params": {"max_tokens": 4}}},
    )
    assert resolved.stages[1].default_sampling == {
        "temperature": 0.9,  # pipeline
        "extra_args": {"frames": 1},
        "top_k": 1,  # stage
        "top_p": 0.2,  # the file's override
        "seed": 3,  # --default-sampling-params
        "max_tokens": 4,  # --stage-overrides
    }
    assert resolved.pipeline.stages[1].default_sampling["top_k"] == 50


def test_subtalker_sampling_goes_where_the_talker_reads_it(plan: Planner) -> None:
    deploy = {"stages": [{"stage_id": 1, "subtalker_sampling_params": {"top_k": 7}}]}
    extra = plan(deploy).stages[1].default_sampling["extra_args"]
    assert extra == {"frames": 1, "subtalker_sampling_params": {"top_k": 7}}


@pytest.mark.parametrize(
    ("file", "flag", "result"),
    [(None, None, True), (False, None, False), (False, True, True), (True, False, False)],
)
def test_async_chunk(plan: Planner, file: Any, flag: Any, result: bool) -> None:
    assert plan({"async_chunk": file}, async_chunk=flag).async_chunk is result


def test_where_each_value_came_from(plan: Planner) -> None:
    stage = plan(
        {"dtype": "half", "stages": [{"stage_id": 0, "seed": 1}]},
        cli={"max_num_seqs": 2},
        stage_overrides={"thinker": {"max_model_len": 9}},
    ).stages[0]
    assert stage.sources["dtype"] == "deploy config: dtype"
    assert stage.sources["seed"] == "deploy config: stages[0].seed"
    assert stage.sources["max_num_seqs"] == "--max-num-seqs"
    assert stage.sources["max_model_len"] == "--stage-overrides thinker.max_model_len"


def test_keyword_arguments_are_called_by_their_name(plan: Planner) -> None:
    stage = plan(cli={"max_num_seqs": 2}, flag_style="{name}").stages[0]
    assert stage.sources["max_num_seqs"] == "max_num_seqs"
