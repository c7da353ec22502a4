# SPDX-License-Identifier: Apache-2.0
"""Pipelines on several devices: what is refused before anything is loaded, and what ranks load."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from vllm_omni.config.diffusers import call_parameters, model_index, pipeline_class
from vllm_omni.diffusion.programs.diffusers.acceleration import DENOISERS, use_asked_attention
from vllm_omni.diffusion.programs.diffusers.components import (
    component_class,
    model_dtype,
    named,
    random_model,
)
from vllm_omni.diffusion.programs.diffusers.parallel import SHARINGS, check_weights, share
from vllm_omni.diffusion.ranks.group import BACKENDS
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

GUIDED = "do_classifier_free_guidance"
"""What pipelines have that are guided, some of them away from nothing (FLUX.2 Klein)."""
WHOLE_SEQUENCES = ("FLASH_ATTN_3",)
"""Attention backends that diffusers shares no sequences with."""


def check(ctx: LoadContext) -> None:
    """See that the deployment's settings and its checkpoint can run on several devices.

    Raises:
        OmniConfigError: They cannot; the message names the setting.
    """
    _check_settings(ctx)
    index = model_index(ctx.model, ctx.revision)
    pipeline = pipeline_class(ctx.model_class_name or index["_class_name"])
    guided = "negative_prompt" in call_parameters(pipeline)
    if ctx.cfg_parallel_size > 1 and not (guided or GUIDED in dir(pipeline)):
        raise OmniConfigError(
            f"cfg_parallel_size = {ctx.cfg_parallel_size}: {pipeline.__name__} has no "
            "guidance whose halves could run apart"
        )
    for name, cls in _denoiser_classes(index).items():
        _check_denoiser(ctx, name, cls)


def load(ctx: LoadContext) -> Mapping[str, nn.Module]:
    """What a rank that is not the first holds: its part of the denoisers."""
    assert ctx.group is not None
    models = {}
    for name, cls in _denoiser_classes(model_index(ctx.model, ctx.revision)).items():
        model = random_model(ctx, name, cls) if ctx.random_weights else _read(ctx, name, cls)
        assert isinstance(model, ModelMixin)
        share(model, ctx.group)
        models[name] = model.to(ctx.device).eval().requires_grad_(False)
    use_asked_attention(list(models.values()), ctx)
    return models


def _read(ctx: LoadContext, name: str, cls: type[ModelMixin]) -> ModelMixin:
    return cls.from_pretrained(
        ctx.model,
        subfolder=name,
        revision=ctx.revision,
        dtype=model_dtype(ctx),
        use_safetensors=True,
    )


def _denoiser_classes(index: Mapping[str, Any]) -> dict[str, type[ModelMixin]]:
    found = {n: component_class(*entry) for n, entry in named(index).items() if n in DENOISERS}
    return {n: cls for n, cls in found.items() if cls is not None and issubclass(cls, ModelMixin)}


def _sizes(ctx: LoadContext) -> dict[str, int]:
    """The settings that ask for several devices."""
    sizes = {
        "tensor_parallel_size": ctx.tensor_parallel_size,
        "ulysses_degree": ctx.ulysses_degree,
        "cfg_parallel_size": ctx.cfg_parallel_size,
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _asked(ctx: LoadContext, *names: str) -> str:
    """Settings as a message names them."""
    sizes = _sizes(ctx)
    return ", ".join(f"{name} = {sizes[name]}" for name in names or sizes if name in sizes)


def _check_settings(ctx: LoadContext) -> None:
    asked = _asked(ctx)
    if ctx.device.type not in BACKENDS:
        raise OmniConfigError(f"{asked}: not on {ctx.device.type}, only on {', '.join(BACKENDS)}")
    if ctx.cache_backend != "none":
        raise OmniConfigError(
            f"cache_backend = {ctx.cache_backend!r}: not together with {asked}, for every rank "
            "would decide for itself what to leave out"
        )
    if ctx.lora_modules or ctx.lora_path is not None:
        key = "lora_modules" if ctx.lora_modules else "lora_path"
        raise OmniConfigError(f"{key}: not together with {asked}: only the first rank has adapters")
    if ctx.ulysses_degree > 1 and ctx.diffusion_attention_backend in WHOLE_SEQUENCES:
        raise OmniConfigError(
            f"diffusion_attention_backend = {ctx.diffusion_attention_backend!r}: not together with "
            f"{_asked(ctx, 'ulysses_degree')}"
        )


def _check_denoiser(ctx: LoadContext, name: str, cls: type[ModelMixin]) -> None:
    if cls.__name__ not in SHARINGS:
        raise OmniConfigError(
            f"{_asked(ctx)}: {name} is a {cls.__name__}; those that can run on several devices are "
            f"{', '.join(SHARINGS)}"
        )
    config = cls.load_config(ctx.model, subfolder=name, revision=ctx.revision)
    heads = config["num_attention_heads"]
    if heads % (ctx.tensor_parallel_size * ctx.ulysses_degree):
        sizes = _asked(ctx, "tensor_parallel_size", "ulysses_degree")
        raise OmniConfigError(f"{sizes}: {name} has {heads} attention heads, not a multiple of it")
    with torch.device("meta"):
        model = cls.from_config(config)
    try:
        check_weights(model, ctx.tensor_parallel_size)
    except ValueError as error:
        raise OmniConfigError(f"{_asked(ctx, 'tensor_parallel_size')}: {name}: {error}") from error
