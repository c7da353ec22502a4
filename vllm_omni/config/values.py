# SPDX-License-Identifier: Apache-2.0
"""Types of values of the schema that are stricter, or take more, than pydantic's own."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from vllm_omni.config.problems import did_you_mean

STEP_CACHES = ("none", "cache_dit", "first_block", "mag_cache", "taylorseer")
ATTENTION_BACKENDS = (
    "auto",
    "TORCH_SDPA",
    "CUDNN_ATTN",
    "FLASH_ATTN",
    "FLASH_ATTN_3",
    "FLASH_ATTN_HUB",
    "FLASH_ATTN_3_HUB",
    "SAGE_ATTN",
)
"""Of diffusion stages."""
COMPILE_GRANULARITIES = ("regional", "full")


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number, not a boolean")
    return value


def _max_model_len(value: Any) -> Any:
    if value == "auto":
        return -1
    if value in (0, False):
        raise ValueError("should be at least 1, or auto")
    return _number(value)


def _cache_backend(value: str) -> str:
    near = "; the nearest one is first_block" if value == "tea_cache" else ""
    return _one_of(value, STEP_CACHES, near)


def _attention_backend(value: str) -> str:
    names = {name.lower(): name for name in ATTENTION_BACKENDS}
    return _one_of(names.get(value.lower(), value), ATTENTION_BACKENDS)


def _granularity(value: str) -> str:
    return _one_of(value, COMPILE_GRANULARITIES)


def _one_of(value: str, known: tuple[str, ...], near: str = "") -> str:
    if value not in known:
        near = near or did_you_mean(value, known)
        raise ValueError(f"should be one of {', '.join(known)}{near}")
    return value


def _env_value(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


EnvValue = Annotated[str, BeforeValidator(_env_value)]
Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
MaxModelLen = Annotated[int, BeforeValidator(_max_model_len)]
StepCacheName = Annotated[str, AfterValidator(_cache_backend)]
AttentionBackend = Annotated[str, AfterValidator(_attention_backend)]
CompileGranularity = Annotated[str, AfterValidator(_granularity)]
