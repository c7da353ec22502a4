# SPDX-License-Identifier: Apache-2.0
"""Loading a diffusers checkpoint: its components by diffusers' and transformers' own loaders."""

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging as diffusers_logging
from huggingface_hub.errors import HfHubHTTPError
from torch import nn

from vllm_omni.config.diffusers import MODEL_INDEX, model_index, pipeline_class
from vllm_omni.diffusion.programs.diffusers.acceleration import DENOISERS, accelerate, denoisers
from vllm_omni.diffusion.programs.diffusers.adapters import Adapters
from vllm_omni.diffusion.programs.diffusers.components import (
    component_class,
    model_dtype,
    named,
    random_model,
)
from vllm_omni.diffusion.programs.diffusers.embeddings import EmbeddingCache
from vllm_omni.diffusion.programs.diffusers.hook_cache import HookCache
from vllm_omni.diffusion.programs.diffusers.kit import Kit, registered
from vllm_omni.diffusion.programs.diffusers.parallel import MASKED_RANKS, share, unmasked
from vllm_omni.diffusion.programs.diffusers.rules import methods_of
from vllm_omni.diffusion.programs.diffusers.schedule import (
    shifted,
    why_no_boundary,
    why_unshiftable,
)
from vllm_omni.diffusion.programs.diffusers.step_cache import StepCache
from vllm_omni.diffusion.programs.diffusers.variants import within
from vllm_omni.diffusion.spec import Component, LoadContext, Loaded
from vllm_omni.errors import OmniConfigError

logger = logging.getLogger(__name__)


def load(ctx: LoadContext) -> Loaded:
    """The checkpoint's pipeline, on its device, in evaluation mode.

    Raises:
        OmniConfigError: The checkpoint is no diffusers pipeline, or a component is missing or
            damaged; the message names it.
    """
    diffusers_logging.disable_progress_bar()
    index = model_index(ctx.model, ctx.revision)
    cls = pipeline_class(ctx.model_class_name or index["_class_name"])
    dtype = model_dtype(ctx)
    given = _random_models(ctx, index) if ctx.random_weights else {}
    try:
        pipeline = cls.from_pretrained(
            ctx.model,
            revision=ctx.revision,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=ctx.trust_remote_code,
            **given,
        )
    except (OSError, ValueError, TypeError, KeyError, HfHubHTTPError) as error:
        raise OmniConfigError(_why(ctx.model, index, error)) from error
    _configure(pipeline, ctx)
    pipeline.set_progress_bar_config(disable=True)
    if ctx.group is not None:
        for model in denoisers(pipeline).values():
            share(model, ctx.group)
    pipeline.to(ctx.device)
    kit = Kit.of(pipeline)
    for module in kit.models().values():
        module.eval().requires_grad_(False)
    accelerate(pipeline, kit, ctx)
    adapters, cache = Adapters.of(pipeline, ctx), _step_cache(pipeline, ctx)
    components = {}
    for name, module in kit.models().items():
        methods = methods_of(module)
        if name in cache:  # which decides for a whole forward, and remembers by request
            methods = {method: replace(rules, max_batch=1) for method, rules in methods.items()}
        spread = ctx.group is not None and name in DENOISERS
        if spread and ctx.ulysses_degree > MASKED_RANKS:
            methods = {method: unmasked(rules) for method, rules in methods.items()}
        components[name] = Component(module, methods, within(name, adapters, cache), spread)
    assets = {
        "kit": kit,
        "embeddings": EmbeddingCache(int(ctx.prompt_embedding_cache_mb * 2**20)),
        "adapters": adapters,
        "step_cache": cache,
    }
    return Loaded(components, assets)


def _why(model: str, index: Mapping[str, Any], error: Exception) -> str:
    """Which component is missing, if one is; else diffusers' own words."""
    folder = Path(model)
    if folder.is_dir():
        for name, (library, class_name) in named(index).items():
            if not (folder / name).is_dir():
                return (
                    f"model {model!r}: component {name!r} ({library}.{class_name}) is missing: "
                    f"{MODEL_INDEX} names it, but there is no folder {name}/"
                )
    return f"model {model!r}: {error}"


def _configure(pipeline: DiffusionPipeline, ctx: LoadContext) -> None:
    """Settings that the deployment puts over the checkpoint's."""
    if ctx.flow_shift is not None:
        for name, part in registered(pipeline).items():
            if isinstance(part, SchedulerMixin):
                if reason := why_unshiftable(part):
                    raise OmniConfigError(f"flow_shift: {reason}")
                vars(pipeline)[name] = shifted(part, ctx.flow_shift)
    if ctx.boundary_ratio is not None:
        if reason := why_no_boundary(pipeline):
            raise OmniConfigError(f"boundary_ratio: {reason}")
        pipeline.register_to_config(boundary_ratio=ctx.boundary_ratio)
    vae = registered(pipeline).get("vae")
    for asked, flag, method in (
        (ctx.vae_use_slicing, "vae_use_slicing", "enable_slicing"),
        (ctx.vae_use_tiling, "vae_use_tiling", "enable_tiling"),
    ):
        if asked:
            if vae is None or not hasattr(type(vae), method):
                raise OmniConfigError(f"{flag}: the VAE of {type(pipeline).__name__} cannot")
            getattr(vae, method)()


def _step_cache(pipeline: DiffusionPipeline, ctx: LoadContext) -> StepCache:
    """The step cache that the deployment asks for."""
    if ctx.cache_backend == "none":
        return StepCache({})
    if ctx.cache_backend != "cache_dit":
        return HookCache.of(pipeline, ctx)
    if importlib.util.find_spec("cache_dit") is None:
        raise OmniConfigError(
            "cache_backend = 'cache_dit': needs the package cache-dit, which is not installed: "
            "pip install 'vllm-omni[cache-dit]'"
        )
    from vllm_omni.diffusion.programs.diffusers.dit_cache import DitCache

    return DitCache.of(pipeline, ctx)


def _random_models(ctx: LoadContext, index: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The models with random weights."""
    classes = {name: component_class(*entry) for name, entry in named(index).items()}
    models = {n: random_model(ctx, n, cls) for n, cls in classes.items() if cls is not None}
    return {name: model for name, model in models.items() if model is not None}
