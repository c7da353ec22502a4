# SPDX-License-Identifier: Apache-2.0
"""The step cache of cache-dit: DBCache, with TaylorSeer and step masks.

cache-dit wraps a transformer object and keeps one state with it. All requests share the
transformer, so what it is given to wrap is a view of it: an object of the same class around the
same weights. Each context of a request has its own, and what cache-dit keeps goes with it.
"""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import cache_dit
from cache_dit.caching import FakeDiffusionPipeline
from diffusers import DiffusionPipeline
from pydantic import Field, ValidationError
from torch import nn

from vllm_omni.config.problems import from_validation_error
from vllm_omni.config.schema import Float, Int, Section
from vllm_omni.diffusion.programs.diffusers.kit import registered
from vllm_omni.diffusion.programs.diffusers.step_cache import StepCache, context_name
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

Wrapped = Mapping[str, nn.Module]
"""Views of the denoisers by name, with cache-dit at work in them."""


class Settings(Section):
    """`cache_config`: names and defaults are those of vLLM-Omni."""

    Fn_compute_blocks: Int = Field(default=1, ge=1)
    Bn_compute_blocks: Int = Field(default=0, ge=0)
    max_warmup_steps: Int = Field(default=4, ge=0)
    warmup_interval: Int = Field(default=1, ge=1)
    max_cached_steps: Int = Field(default=-1, ge=-1)
    max_continuous_cached_steps: Int = Field(default=3, ge=-1)
    residual_diff_threshold: Float = Field(default=0.24, ge=0)
    max_accumulated_residual_diff_threshold: Float | None = Field(default=None, gt=0)
    enable_taylorseer: bool = False
    taylorseer_order: Int = Field(default=1, ge=1)
    scm_steps_mask_policy: Literal["slow", "medium", "fast", "ultra"] | None = None
    scm_steps_policy: Literal["dynamic", "static"] = "dynamic"
    num_inference_steps: Int | None = Field(
        default=None, ge=1, description="Of requests of which it is not known."
    )

    def of_blocks(self, steps: int | None, alternating: bool) -> cache_dit.DBCacheConfig:
        """cache-dit's configuration.

        Args:
            steps: Of the request.
            alternating: Every second forward is of the other half of guidance.
        """
        return cache_dit.DBCacheConfig(
            **self.model_dump(include=_AS_THEY_ARE),
            enable_separate_cfg=alternating,
            steps_computation_mask=self._mask(self.num_inference_steps if steps is None else steps),
            steps_computation_policy=self.scm_steps_policy,
        )

    def of_forecasts(self) -> cache_dit.TaylorSeerCalibratorConfig | None:
        """How what is left out is forecast; None: as it last was."""
        if not self.enable_taylorseer:
            return None
        return cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=self.taylorseer_order)

    def _mask(self, steps: int | None) -> list[int] | None:
        """1 for each step that has to be computed; None for no mask."""
        policy = self.scm_steps_mask_policy
        if policy is None or steps is None:
            return None
        if steps < _FEWEST_MASKED and steps not in _ALSO_MASKED:
            return [1] * steps
        return cache_dit.steps_mask(total_steps=steps, mask_policy=policy)


_AS_THEY_ARE = {
    "Fn_compute_blocks",
    "Bn_compute_blocks",
    "max_warmup_steps",
    "warmup_interval",
    "max_cached_steps",
    "max_continuous_cached_steps",
    "residual_diff_threshold",
    "max_accumulated_residual_diff_threshold",
}
_FEWEST_MASKED, _ALSO_MASKED = 8, (4, 6)
"""Numbers of steps that cache-dit has masks for."""


class DitCache(StepCache):
    """cache-dit for a replica's denoisers.

    Args:
        pipeline: Whose they are.
        models: Those that cache-dit wraps, by name.
        settings: For all requests.
        alternating: The pipeline calls its transformer once for each half of guidance.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        models: Mapping[str, nn.Module],
        settings: Settings,
        alternating: bool,
    ) -> None:
        super().__init__(models)
        self._pipeline = pipeline
        self._settings = settings
        self._alternating = alternating
        self._steps: dict[str, int | None] = {}
        self._wrapped: dict[str, Wrapped] = {}

    @classmethod
    def of(cls, pipeline: DiffusionPipeline, ctx: LoadContext) -> "DitCache":
        """The cache that a deployment asks for; it is tried on.

        Raises:
            OmniConfigError: Its settings are wrong, or cache-dit does not know the pipeline.
        """
        try:
            settings = Settings.model_validate(ctx.cache_config)
        except ValidationError as error:
            raise from_validation_error("cache_config", error) from None
        _hush()
        parts = registered(pipeline)
        views = {n: view_of(part) for n, part in parts.items() if isinstance(part, nn.Module)}
        try:
            adapter = _adapter(pipeline, views)
            _check_sizes(adapter, settings)
            wrap(adapter, settings, None, False)
        except (AssertionError, ImportError, ValueError) as error:  # how cache-dit says no
            raise OmniConfigError(
                f"cache_backend = 'cache_dit': not for {type(pipeline).__name__}: {error}"
            ) from error
        denoisers = cache_dit.BlockAdapter.flatten(adapter.transformer)
        chosen = [n for n, view in views.items() if any(view is each for each in denoisers)]
        alternating = cache_dit.BlockAdapterRegister.has_separate_cfg(pipeline)
        _release(views)
        return cls(pipeline, {name: parts[name] for name in chosen}, settings, alternating)

    @property
    def remembered(self) -> frozenset[str]:
        return frozenset(self._wrapped)

    def begin(self, owner: str, steps: int | None) -> None:
        self._steps[owner] = steps

    @contextmanager
    def entered(self, component: str, context: str | None) -> Iterator[nn.Module | None]:
        if context is None:
            yield None
            return
        if context not in self._wrapped:
            self._wrapped[context] = self._wrap(context)
        yield self._wrapped[context][component]

    def forget(self, owner: str) -> None:
        self._steps.pop(owner, None)
        mine = context_name(owner, "")
        for name in [name for name in self._wrapped if name.startswith(mine)]:
            _release(self._wrapped.pop(name))

    def _wrap(self, context: str) -> Wrapped:
        owner, _, name = context.rpartition("/")
        views = {each: view_of(model) for each, model in self._models.items()}
        # A pipeline that names its calls has a state for each name, whether it guides or not.
        alternating = self._alternating and not name
        wrap(_adapter(self._pipeline, views), self._settings, self._steps.get(owner), alternating)
        return views


def view_of(model: nn.Module) -> nn.Module:
    """The same model in an object of its own: what is put in the place of it, of its blocks or of
    their methods, the model itself does not see."""
    view = copy.copy(model)
    parts = dict(vars(model)["_modules"])  # as torch's own replicas have them
    for name, part in parts.items():
        if isinstance(part, nn.ModuleList):
            parts[name] = nn.ModuleList(copy.copy(block) for block in part)
    vars(view)["_modules"] = parts
    return view


def wrap(
    adapter: cache_dit.BlockAdapter, settings: Settings, steps: int | None, alternating: bool
) -> None:
    """Let cache-dit work in an adapter's transformers."""
    cache_dit.enable_cache(
        adapter,
        cache_config=settings.of_blocks(steps, alternating),
        calibrator_config=settings.of_forecasts(),
    )


def _adapter(pipeline: DiffusionPipeline, views: Mapping[str, nn.Module]) -> Any:
    """cache-dit's description of a pipeline, with views in the place of its models.

    Raises:
        ValueError: cache-dit has none.
    """
    stand_in = object.__new__(type(pipeline))
    vars(stand_in).update({**vars(pipeline), **views})
    adapter = cache_dit.get_adapter(stand_in)
    if adapter is None:
        raise ValueError("cache-dit does not know it")
    # Of a pipeline it would replace the class's `__call__`, for all.
    adapter.pipe = FakeDiffusionPipeline()
    return adapter


def _check_sizes(adapter: cache_dit.BlockAdapter, settings: Settings) -> None:
    """cache-dit would tell at the first request, or not at all."""
    groups = [len(blocks) for blocks in cache_dit.BlockAdapter.flatten([adapter.blocks])]
    first, last = settings.Fn_compute_blocks, settings.Bn_compute_blocks
    for name, wanted in (("Fn_compute_blocks", first), ("Bn_compute_blocks", last)):
        if wanted > min(groups):
            raise OmniConfigError(
                f"cache_config.{name} = {wanted}: the model has a group of {min(groups)} blocks"
            )
    if first + last >= max(groups):
        raise OmniConfigError(
            f"cache_config: Fn_compute_blocks + Bn_compute_blocks = {first + last} of "
            f"{max(groups)} blocks: nothing would be left out"
        )


def _release(wrapped: Wrapped) -> None:
    """The views and what wraps them know each other: let go of all of it at once."""
    for view in wrapped.values():
        vars(view).clear()


def _hush() -> None:
    """It tells of each transformer that it wraps: here, several times a request."""
    for handler in logging.getLogger("CACHE_DIT").handlers:
        handler.setLevel(max(handler.level, logging.WARNING))
