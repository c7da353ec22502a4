# SPDX-License-Identifier: Apache-2.0
"""Attention kernels and compilation of denoisers, by diffusers' own switches, checked at the start.

Which of them are on is settled before the stage is ready: a small request runs through the stock
pipeline with diffusers' defaults and then with what was chosen (`start_check.py`). So kernels are
compiled then and not at the first request, and what fails or differs too much is left off with a
warning.

Blocks are compiled for sizes that vary, so that other resolutions and batches compile nothing anew,
but for what torch always treats apart: a single row, and a mask or none. torch itself bounds such
variants of a block by 8; a further one runs as it is.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from diffusers import DiffusionPipeline
from diffusers.models.modeling_utils import ModelMixin

from vllm_omni.diffusion.programs.diffusers.kit import Kit, registered
from vllm_omni.diffusion.programs.diffusers.start_check import FAILURES, StartCheck
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniConfigError

logger = logging.getLogger(__name__)

BACKENDS: Mapping[str, str] = {
    "TORCH_SDPA": "native",
    "CUDNN_ATTN": "_native_cudnn",
    "FLASH_ATTN": "flash",
    "FLASH_ATTN_3": "_flash_3",
    "FLASH_ATTN_HUB": "flash_hub",
    "FLASH_ATTN_3_HUB": "_flash_3_hub",
    "SAGE_ATTN": "sage",
}
"""The deployment's name of an attention backend -> diffusers'."""
NATIVE = "TORCH_SDPA"
DENOISERS = ("transformer", "transformer_2", "unet")
"""Components that run at every step."""
HOPPER = (9, 0)
"""Compute capability."""


def accelerate(pipeline: DiffusionPipeline, kit: Kit, ctx: LoadContext) -> None:
    """Choose the denoisers' attention backend and compile their blocks, as the deployment says.

    Args:
        pipeline: On its device; its denoisers are changed in place.
        kit: Of the pipeline.
        ctx: With the deployment's settings.
    """
    models = list(denoisers(pipeline).values())
    if ctx.group is not None:
        logger.info("Denoisers are not compiled: they run on several devices")
        use_asked_attention(models, ctx)
        return
    backends, compiles = _backends(ctx), _compiles(models, ctx)
    if not models or not (backends or compiles):
        return
    check = StartCheck.of(kit)
    asked = ctx.diffusion_attention_backend != "auto"
    if check.reference is not None or asked:
        for backend in backends:
            if _use(models, backend, check, logging.WARNING if asked else logging.INFO):
                break
    if compiles:
        compile_blocks(
            models,
            dynamic=ctx.diffusion_compile_dynamic,
            full=ctx.diffusion_compile_granularity == "full",
        )
        _settle(check)


def denoisers(pipeline: DiffusionPipeline) -> dict[str, ModelMixin]:
    """The models that run at every step, by name."""
    found = ((name, registered(pipeline).get(name)) for name in DENOISERS)
    return {name: part for name, part in found if isinstance(part, ModelMixin)}


def compile_blocks(
    models: Sequence[ModelMixin], *, dynamic: bool | None, full: bool = False
) -> None:
    """Have denoisers' repeated blocks, or the whole of them, compiled when they first run.

    Args:
        models: Denoisers; of such without repeated blocks nothing is compiled unless `full`.
        dynamic: For sizes that vary; None for those of the first run until others come.
        full: The whole of them.
    """
    for model in models:
        if full:
            model.compile(dynamic=dynamic)
        elif model._repeated_blocks:
            model.compile_repeated_blocks(dynamic=dynamic)


def use_attention(models: Sequence[ModelMixin], backend: str) -> None:
    """Have denoisers use an attention backend.

    Args:
        models: Denoisers.
        backend: The deployment's name of it.

    Raises:
        RuntimeError: Its package is not installed.
    """
    for model in models:
        model.set_attention_backend(BACKENDS[backend])


def use_asked_attention(models: Sequence[ModelMixin], ctx: LoadContext) -> None:
    """Have the denoisers of one of several ranks use the attention backend that the deployment
    names: no request runs at the start that could tell which is good.

    Raises:
        OmniConfigError: It is not there.
    """
    asked = ctx.diffusion_attention_backend
    if asked == "auto":
        return
    try:
        use_attention(models, asked)
    except FAILURES as error:
        raise OmniConfigError(f"diffusion_attention_backend = {asked!r}: {error}") from error


def _backends(ctx: LoadContext) -> tuple[str, ...]:
    """Attention backends to try, best first; none where diffusers' default is to stay."""
    asked = ctx.diffusion_attention_backend
    if asked != "auto":
        return () if asked == NATIVE else (asked,)
    if ctx.device.type != "cuda" or torch.version.hip is not None:
        return ()
    if torch.cuda.get_device_capability(ctx.device) < HOPPER:
        return ()
    return "FLASH_ATTN_3", "CUDNN_ATTN"


def _compiles(models: Sequence[ModelMixin], ctx: LoadContext) -> bool:
    """Whether to compile. Not what changes its layers from request to request."""
    if ctx.enforce_eager:
        return False
    if ctx.lora_modules or ctx.lora_path is not None:
        logger.info("Denoisers are not compiled: adapters change their layers")
        return False
    if ctx.cache_backend != "none":
        logger.info("Denoisers are not compiled: a step cache changes their blocks")
        return False
    return ctx.diffusion_compile_granularity == "full" or any(m._repeated_blocks for m in models)


def _use(models: Sequence[ModelMixin], backend: str, check: StartCheck, level: int) -> bool:
    """Try an attention backend; if it is not there or not good enough, the default stays."""
    try:
        use_attention(models, backend)
        problem = check.problem()
    except FAILURES as error:
        problem = str(error)
    if problem is None:
        logger.info("Attention backend of denoisers: %s", backend)
        return True
    logger.log(level, "Attention backend %s is not used: %s", backend, problem)
    use_attention(models, NATIVE)
    return False


def _settle(check: StartCheck) -> None:
    """Compile by running; if that fails or the result is not good enough, nothing is compiled."""
    if check.reference is None:
        logger.info("Denoisers are compiled when the first request comes")
        return
    began = time.monotonic()
    try:
        problem = check.problem()
    except FAILURES as error:
        problem = str(error)
    if problem is None:
        logger.info("Denoisers compiled in %.0f s", time.monotonic() - began)
        return
    logger.warning("Denoisers run uncompiled: %s", problem)
    torch.compiler.set_stance("force_eager")
