# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a stage cannot divide among them is refused when a deployment is planned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.build import build_plan
from vllm_omni.config.plan import DeploymentPlan
from vllm_omni.errors import OmniConfigError

from .conftest import CPU, PIPELINE, Planner, write_checkpoint

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

SIZES = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
}


@pytest.fixture
def of_sizes(tmp_path: Path) -> Callable[..., DeploymentPlan]:
    """The plan of a checkpoint with such sizes."""

    def make(sizes: dict[str, Any], **settings: Any) -> DeploymentPlan:
        model = write_checkpoint(tmp_path / "sized", **{**SIZES, **sizes})
        return build_plan(
            model,
            deploy_config={"stages": [{"stage_id": 1, **settings}]},
            resolve=lambda *args, **kw: PIPELINE,
            host=CPU,
        )

    return make


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_rank_has_a_place_on_a_cpu(
    of_sizes: Callable[..., DeploymentPlan], ranks: int
) -> None:
    """Keys and values may be fewer than ranks: some of these have the same ones."""
    plan = of_sizes({}, devices="cpu", tensor_parallel_size=ranks, num_replicas=2)
    assert plan.stages[1].devices == (("cpu",) * ranks,) * 2
    assert plan.stages[1].engine_args["tensor_parallel_size"] == ranks
    assert plan.stages[0].devices == (("cpu",),)


@pytest.mark.parametrize(
    ("sizes", "ranks", "says"),
    [
        ({}, 3, "num_attention_heads = 8 is no multiple of 3"),
        ({"intermediate_size": 90}, 4, "intermediate_size = 90 is no multiple of 4"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            6,
            "num_key_value_heads = 4 is neither a multiple nor a divisor of 6",
        ),
        ({"moe_intermediate_size": 6}, 4, "moe_intermediate_size = 6 is no multiple of 4"),
        (
            {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 6},
            4,
            "shared_expert_intermediate_size = 6 is no multiple of 4",
        ),
    ],
)
def test_what_is_indivisible(
    of_sizes: Callable[..., DeploymentPlan], sizes: dict[str, Any], ranks: int, says: str
) -> None:
    with pytest.raises(OmniConfigError) as caught:
        of_sizes(sizes, tensor_parallel_size=ranks)
    assert str(caught.value) == (
        f"stage 1 (talker): tensor_parallel_size = {ranks} (from deploy config: "
        f"stages[0].tensor_parallel_size): the checkpoint's {says}"
    )


def test_experts_may_be_whole(of_sizes: Callable[..., DeploymentPlan]) -> None:
    """The width of all layers together is none that a model of experts has."""
    sizes = {"moe_intermediate_size": 6, "intermediate_size": 90}
    plan = of_sizes(sizes, tensor_parallel_size=4, enable_expert_parallel=True)
    assert plan.stages[1].engine_args["enable_expert_parallel"] is True


def test_a_model_that_runs_on_one_device_only(plan: Planner) -> None:
    thinker, talker, decoder = PIPELINE.stages
    pipeline = replace(PIPELINE, stages=(thinker, replace(talker, shared_sections=()), decoder))
    with pytest.raises(OmniConfigError, match=r"1 \(talker\): tensor_parallel_size = 2 .* only"):
        plan(pipeline=pipeline, cli={"tensor_parallel_size": 2})
    assert plan(pipeline=pipeline, stage_overrides={"0": {"tensor_parallel_size": 2}})


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("pipeline_parallel_size", "tensor_parallel_size"),
        ("data_parallel_size", "num_replicas"),
    ],
)
def test_stages_with_rows_are_divided_in_no_other_way(
    of_sizes: Callable[..., DeploymentPlan], key: str, instead: str
) -> None:
    with pytest.raises(OmniConfigError) as caught:
        of_sizes({}, **{key: 2})
    assert str(caught.value).startswith(f"stage 1 (talker): {key} = 2 (from deploy config: ")
    assert str(caught.value).endswith(f"; use {instead}")


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        ("dia", "one device only"),
        ("qwen3_tts_base", "talker_config.num_attention_heads = 4"),
        ("voxcpm2", "lm_config.num_attention_heads = 2"),
        ("higgs_audio_v2", "the checkpoint's num_attention_heads = 4"),
    ],
)
def test_families(family: str, refused: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Sizes are found where each family's config has them."""
    with pytest.raises(OmniConfigError, match=f"tensor_parallel_size = 3 .*{refused}"):
        build_plan(str(tiny_checkpoint(family)), cli={"tensor_parallel_size": 3})
