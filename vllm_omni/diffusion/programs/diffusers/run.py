# SPDX-License-Identifier: Apache-2.0
"""The program: one request through a stock diffusers pipeline."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from transformers import PreTrainedTokenizerBase

from vllm_omni.config.diffusers import modality_of
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.programs.diffusers.adapters import Adapters
from vllm_omni.diffusion.programs.diffusers.arguments import (
    call_arguments,
    field_named_in,
    steps_of,
)
from vllm_omni.diffusion.programs.diffusers.embeddings import (
    EmbeddingCache,
    is_encoder,
)
from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.programs.diffusers.preview import can_preview, decode, preview_steps
from vllm_omni.diffusion.programs.diffusers.results import tensors_of
from vllm_omni.diffusion.programs.diffusers.schedule import set_schedule
from vllm_omni.diffusion.programs.diffusers.shapes import field_at_fault
from vllm_omni.diffusion.programs.diffusers.sizes import check_one_picture
from vllm_omni.diffusion.programs.diffusers.step_cache import StepCache
from vllm_omni.diffusion.programs.diffusers.truncation import telling, tokens_kept
from vllm_omni.diffusion.programs.diffusers.variants import varied
from vllm_omni.diffusion.programs.diffusers.watch import Step, watched
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import GenerationRequest
from vllm_omni.outputs import STEP, STEPS

logger = logging.getLogger(__name__)

DENOISERS = ("transformer", "unet", "prior", "dit")


def run(ctx: Program) -> None:
    """Run the pipeline that the request needs; emits progress, previews and what it made."""
    kit: Kit = ctx.assets["kit"]
    cache: EmbeddingCache = ctx.assets["embeddings"]
    adapters: Adapters = ctx.assets["adapters"]
    step_cache: StepCache = ctx.assets["step_cache"]
    message = ctx.receive()
    request = msgspec.convert(dict(message.options), GenerationRequest)
    chosen = kit.choose(request.media)
    check_one_picture(chosen, request.media)
    pipeline = kit.private(chosen, ctx)
    set_schedule(pipeline, kit.parts, request.params)
    arguments = call_arguments(chosen, request, message.tensors, ctx.device)
    own = vars(pipeline)
    wanted = adapters.wanted(request.params.lora)
    kept = tokens_kept(chosen, arguments)
    for name, part in kit.parts.items():
        if name not in own:
            continue
        if isinstance(part, PreTrainedTokenizerBase):
            own[name] = telling(name, part, ctx.request_id, kept)
        if is_encoder(name, part):
            own[name] = cache.view(name, own[name])
        if name in wanted or name in step_cache:
            own[name] = varied(ctx, name, own[name], wanted.get(name), step_cache)
    schedulers = {n: own[n] for n, p in kit.parts.items() if isinstance(p, SchedulerMixin)}
    denoisers = tuple(n for n in kit.models() if n.startswith(DENOISERS) and n in own)
    facts: dict[str, int | float | str] = {"seed": request.params.seed or 0}
    if request.params.fps is not None:
        facts["fps"] = request.params.fps
    if kit.sample_rate is not None:
        facts["sample_rate"] = kit.sample_rate
    call = _Call(
        ctx=ctx,
        request=request,
        pipeline=pipeline,
        arguments=arguments,
        modality=modality_of(type(chosen)),
        schedulers=schedulers,
        denoisers=denoisers,
        facts=facts,
    )
    try:
        step_cache.begin(ctx.request_id, steps_of(type(chosen), arguments))
        call.run()
    finally:
        step_cache.forget(ctx.request_id)
        # The pipeline, its schedulers and the call know each other: let go of all of it at once.
        own.clear()
        arguments.clear()


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of a pipeline, and what is told on the way.

    Attributes:
        schedulers: The request's own.
        denoisers: Components that run at every step.
        facts: What is told of whatever is made.
        trajectory: Latents after each step so far, if they are wanted.
    """

    ctx: Program
    request: GenerationRequest
    pipeline: DiffusionPipeline
    arguments: dict[str, Any]
    modality: str
    schedulers: Mapping[str, Any]
    denoisers: tuple[str, ...]
    facts: Mapping[str, int | float | str]
    trajectory: list[torch.Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Make what was asked for, and emit it."""
        for name, scheduler in self.schedulers.items():
            vars(self.pipeline)[name] = watched(scheduler, self._stepped)
        if (steps := self.request.params.num_inference_steps) is not None:
            for name in self.denoisers:
                self.ctx.expect(name, steps)
        try:
            result = self.pipeline(**self.arguments)
        except ValueError as error:
            # Pipelines and their models raise it for what they are given and cannot take.
            raise OmniClientError(str(error), param=field_named_in(str(error))) from error
        except RuntimeError as error:
            if (field := field_at_fault(error, self.request)) is None:
                raise
            name = type(self.pipeline).__name__
            logger.warning("%s cannot take `%s`: %s", name, field, error)
            raise OmniClientError(
                f"`{field}`: {name} cannot take this many or this size: {error}", param=field
            ) from error
        tensors = tensors_of(result, self.request.params.output_type)
        if self.trajectory:
            tensors["trajectory"] = torch.stack(self.trajectory).cpu()
        self.ctx.emit(self.modality, tensors, self.facts)

    def _stepped(self, step: Step) -> None:
        params = self.request.params
        for name in self.denoisers:
            per_step = self.ctx.made(name) / step.done
            self.ctx.expect(name, round(per_step * (step.total - step.done)))
        if params.return_trajectory:
            self.trajectory.append(step.latents)
        where = {STEP: step.done, STEPS: step.total}
        if step.done in preview_steps(params.previews, step.total) and can_preview(
            type(self.pipeline), tuple(self.request.media)
        ):
            shown = decode(self.pipeline, self.schedulers, self.arguments, step.clean())
            self.ctx.emit(self.modality, tensors_of(shown, "pil"), {**self.facts, **where})
        elif params.progress:
            self.ctx.emit(self.modality, None, where)
