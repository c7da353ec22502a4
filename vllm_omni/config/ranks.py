# SPDX-License-Identifier: Apache-2.0
"""Whether the ranks of a stage can divide its model among them; checked before anything is loaded.

vLLM divides heads and the widths of feed-forward networks. What it finds indivisible it says with
an assertion in the middle of a stage's start, of some layers only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from vllm_omni.config.merge import Setting
from vllm_omni.config.pipeline import Stage
from vllm_omni.errors import OmniConfigError

TENSOR = "tensor_parallel_size"
DIVIDED = (
    "num_attention_heads",
    "num_heads",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "shared_expert_intermediate_size",
)
"""Sizes in configs of which every rank gets the same share."""


def check_ranks(
    where: str,
    stage: Stage,
    config: PretrainedConfig,
    settings: Mapping[str, Setting],
) -> None:
    """Check how a stage of the AR engine is to be divided.

    Args:
        where: Names the stage in errors.
        stage: What the pipeline says about it.
        config: The checkpoint's whole config.
        settings: Of the stage, from all layers.

    Raises:
        OmniConfigError: It cannot be; names the setting, where that came from, and the size.
    """
    for key in (TENSOR, "pipeline_parallel_size", "data_parallel_size"):
        ranks = settings[key].value if key in settings else 1
        if ranks == 1:
            continue
        given = f"{where}: {key} = {ranks} (from {settings[key].source})"
        if key == TENSOR:
            by_experts = "enable_expert_parallel" in settings and bool(
                settings["enable_expert_parallel"].value
            )
            _check_tensor(given, ranks, stage, config, by_experts)
        elif stage.emits or stage.row_driven:
            instead = TENSOR if key == "pipeline_parallel_size" else "num_replicas"
            raise OmniConfigError(
                f"{given}: stages that exchange rows with others cannot; use {instead}"
            )


def _check_tensor(
    given: str, ranks: int, stage: Stage, config: PretrainedConfig, by_experts: bool
) -> None:
    if not stage.shared_sections:
        raise OmniConfigError(f"{given}: this stage's model runs on one device only; set it to 1")
    whole = config.to_dict()
    for section in stage.shared_sections:
        sizes: Any = whole
        for name in section.split(".") if section else ():
            sizes = sizes[name]
        for name, size, message in _indivisible(sizes, ranks, by_experts):
            path = f"{section}.{name}" if section else name
            raise OmniConfigError(f"{given}: the checkpoint's {path} = {size} {message}")


def _indivisible(
    sizes: Mapping[str, Any], ranks: int, by_experts: bool
) -> Iterator[tuple[str, int, str]]:
    """Sizes of a section that these ranks cannot share, and why."""
    widths = ("intermediate_size",)
    if "moe_intermediate_size" in sizes:
        # The other one is of layers that such models do not have; experts are whole on their rank.
        widths = () if by_experts else ("moe_intermediate_size",)
    for name in (*DIVIDED, *widths):
        size = sizes.get(name)
        if size and size % ranks:
            yield name, size, f"is no multiple of {ranks}"
    keys = sizes.get("num_key_value_heads")
    if keys and keys % ranks and ranks % keys:
        yield "num_key_value_heads", keys, f"is neither a multiple nor a divisor of {ranks}"
