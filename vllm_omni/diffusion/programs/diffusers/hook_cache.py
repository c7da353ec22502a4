# SPDX-License-Identifier: Apache-2.0
"""The step caches of diffusers: hooks on the blocks, which keep a state for each context."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry
from diffusers.hooks.hooks import StateManager
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS
from diffusers.models.cache_utils import CacheMixin
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from vllm_omni.config.problems import did_you_mean
from vllm_omni.diffusion.programs.diffusers.step_cache import StepCache, context_name
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

BACKENDS: Mapping[str, type] = {
    "first_block": FirstBlockCacheConfig,
    "mag_cache": MagCacheConfig,
    "taylorseer": TaylorSeerCacheConfig,
}


class HookCache(StepCache):
    """A cache of diffusers for a replica's denoisers.

    Args:
        models: Those that have one, by name; it is enabled.
    """

    def __init__(self, models: Mapping[str, Any]) -> None:
        super().__init__(models)
        self._managers = [m for model in models.values() for m in _state_managers(model)]

    @classmethod
    def of(cls, pipeline: DiffusionPipeline, ctx: LoadContext) -> "HookCache":
        """The cache that a deployment asks for.

        Raises:
            OmniConfigError: Its settings are wrong, or none of the pipeline's models can have it.
        """
        config = cache_settings(ctx.cache_backend, ctx.cache_config)
        parts = pipeline.components.items()
        models = {name: part for name, part in parts if isinstance(part, CacheMixin)}
        for name, model in models.items():
            try:
                model.enable_cache(config)
            except (ValueError, IndexError) as error:  # blocks that diffusers does not know
                raise OmniConfigError(
                    f"cache_backend = {ctx.cache_backend!r}: not for {name}: {error}"
                ) from error
        cache = cls(models)
        if not cache._managers:
            raise OmniConfigError(
                f"cache_backend = {ctx.cache_backend!r}: no model of {type(pipeline).__name__} "
                "can have it"
            )
        return cache

    @property
    def remembered(self) -> frozenset[str]:
        return frozenset(name for manager in self._managers for name in _states(manager))

    def entered(self, component: str, context: str | None) -> AbstractContextManager[None]:
        if context is None:
            return nullcontext()
        return self._models[component].cache_context(context)

    def forget(self, owner: str) -> None:
        for manager in self._managers:
            states = _states(manager)
            for name in [name for name in states if name.startswith(context_name(owner, ""))]:
                del states[name]


def cache_settings(backend: str, given: Mapping[str, Any]) -> Any:
    """diffusers' configuration of a cache.

    Raises:
        OmniConfigError: A setting is unknown or wrong.
    """
    cls = BACKENDS[backend]
    kinds = {field.name: field.type for field in fields(cls)}
    values = {}
    for name, value in given.items():
        if name not in kinds:
            raise OmniConfigError(
                f"cache_config.{name}: {backend} has no such setting"
                f"{did_you_mean(name, kinds)} (known: {', '.join(kinds)})"
            )
        values[name] = _setting(name, kinds[name], value)
    if backend == "mag_cache" and not {"mag_ratios", "calibrate"} & values.keys():
        raise OmniConfigError(
            "cache_config.mag_ratios: mag_cache needs the model's ratios, as a list or `flux`; "
            "with `calibrate: true` it prints them"
        )
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise OmniConfigError(f"cache_config: {error}") from error


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _setting(name: str, kind: Any, value: Any) -> Any:
    if name == "mag_ratios" and value == "flux":
        return FLUX_MAG_RATIOS
    if name.endswith("_dtype"):
        value = _DTYPES.get(value, value)
    if isinstance(value, bool) and kind is not bool:
        raise OmniConfigError(f"cache_config.{name} = {value!r}: should not be a boolean")
    try:
        config = ConfigDict(arbitrary_types_allowed=True)
        return TypeAdapter(kind, config=config).validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise OmniConfigError(f"cache_config.{name} = {value!r}: {reason}") from error


def _state_managers(model: nn.Module) -> list[StateManager]:
    """Where the hooks on a model's blocks keep what they remember; hooks may share one."""
    found: dict[int, StateManager] = {}
    for module in model.modules():
        registry = vars(module).get("_diffusers_hook")
        if not isinstance(registry, HookRegistry):
            continue
        for hook in registry.hooks.values():
            managers = [part for part in vars(hook).values() if isinstance(part, StateManager)]
            found.update((id(manager), manager) for manager in managers)
    return list(found.values())


def _states(manager: StateManager) -> dict[str, Any]:
    # diffusers can forget all contexts, but not one.
    return manager._state_cache
