# SPDX-License-Identifier: Apache-2.0
"""The program: one request through a stock diffusers pipeline."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from vllm_omni.config.diffusers import modality_of
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.diffusers.arguments import call_arguments
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.programs.diffusers.watch import previous_sample, watched
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest


def run(ctx: Program) -> None:
    """Run the pipeline that the request needs; emits what it made, in one piece."""
    kit: Kit = ctx.assets["kit"]
    message = ctx.receive()
    request = msgspec.convert(dict(message.options), GenerationRequest)
    chosen = kit.choose(request.media)
    pipeline = kit.private(chosen, ctx)
    arguments = call_arguments(chosen, request, message.tensors, ctx.device)
    trajectory: list[torch.Tensor] = []
    _watch(pipeline, ctx, trajectory if request.params.return_trajectory else None)
    _blame_the_client(pipeline)
    result = pipeline(**arguments)
    tensors = tensors_of(result, request.params.output_type)
    if trajectory:
        tensors["trajectory"] = torch.stack(trajectory).cpu()
    ctx.emit(modality_of(type(chosen)), tensors, _facts(pipeline, request))


def _watch(
    pipeline: DiffusionPipeline, ctx: Program, trajectory: list[torch.Tensor] | None
) -> None:
    def on_step(done: int, total: int, result: Any) -> None:
        if trajectory is not None:
            trajectory.append(previous_sample(result))

    for name, part in pipeline.components.items():
        if isinstance(part, SchedulerMixin):
            vars(pipeline)[name] = watched(part, on_step)


def _blame_the_client(pipeline: DiffusionPipeline) -> None:
    """What a pipeline finds wrong with its inputs is the request's fault."""
    members = dir(type(pipeline))
    if "check_inputs" not in members:
        return
    check: Callable[..., Any] = pipeline.check_inputs

    def check_inputs(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except (ValueError, TypeError) as error:
            raise OmniClientError(str(error)) from error

    vars(pipeline)["check_inputs"] = check_inputs


def _facts(pipeline: DiffusionPipeline, request: GenerationRequest) -> dict[str, int | float | str]:
    facts: dict[str, int | float | str] = {"seed": request.params.seed or 0}
    if request.params.fps is not None:
        facts["fps"] = request.params.fps
    if (rate := sample_rate(pipeline)) is not None:
        facts["sample_rate"] = rate
    return facts


def sample_rate(pipeline: DiffusionPipeline) -> int | None:
    """Hz of the sound that a pipeline makes, if it makes sound."""
    for name, key in _RATES:
        part = pipeline.components.get(name)
        config = None if part is None else part.config
        if config is not None and key in dict(config):
            return int(dict(config)[key])
    return None


_RATES = (
    ("vocoder", "output_sampling_rate"),
    ("vocoder", "sampling_rate"),
    ("audio_vae", "sample_rate"),
    ("vae", "sampling_rate"),
    ("vae", "sample_rate"),
)
