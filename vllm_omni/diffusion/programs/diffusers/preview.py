# SPDX-License-Identifier: Apache-2.0
"""What a request would look like if it ended now.

The pipeline itself decodes: it is called again with the latents as they are and a scheduler that
has no step left, so it goes from its preparations straight to its decoding. Nothing of a family's
latents (packing, scaling, their mean) need be known here.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from diffusers import DiffusionPipeline

from vllm_omni.config.diffusers import call_parameters
from vllm_omni.diffusion.proxy import disguised


def can_preview(cls: type[DiffusionPipeline], media: Sequence[str]) -> bool:
    """Whether a pipeline can be shown on the way: it starts from latents alone."""
    return "latents" in call_parameters(cls) and not media


def preview_steps(count: int, total: int) -> frozenset[int]:
    """After which of `total` steps to show `count` pictures; never after the last."""
    return frozenset(round(total * (i + 1) / (count + 1)) for i in range(count)) - {0, total}


def decode(
    pipeline: DiffusionPipeline,
    schedulers: Mapping[str, Any],
    arguments: dict[str, Any],
    latents: torch.Tensor,
) -> Any:
    """What the pipeline returns for these latents.

    Args:
        pipeline: A request's own.
        schedulers: As they were before the call.
        arguments: Of its call.
        latents: As its scheduler's `step` gives them.
    """
    view = copy.copy(pipeline)
    for name, scheduler in schedulers.items():
        vars(view)[name] = _ended(copy.deepcopy(scheduler))
    return view(**{**arguments, "latents": latents})


def _ended(scheduler: Any) -> Any:
    """A view of a private scheduler that never has a step to make."""
    view = object.__new__(_ended_class(type(scheduler)))
    view.__dict__ = vars(scheduler)
    # A class attribute stands in for it.
    view.__dict__.pop("init_noise_sigma", None)
    return view


@cache
def _ended_class(cls: type) -> type:
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.set_timesteps(self, *args, **kwargs)
        self.timesteps = self.timesteps[:0]

    members = {
        "set_timesteps": wraps(cls.set_timesteps)(set_timesteps),
        # Pipelines scale the noise that they start from by it.
        "init_noise_sigma": 1.0,
    }
    return disguised(cls, members)
