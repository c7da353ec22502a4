# SPDX-License-Identifier: Apache-2.0
"""What a scheduler's steps tell about a request: how far it is, and its latents on the way."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from vllm_omni.diffusion.proxy import disguised


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a scheduler.

    Attributes:
        done: Steps that have been made.
        total: Steps in all.
        latents: What the step gave.
        clean: Makes its guess of the noiseless result, where the scheduler has one; else `latents`.
    """

    done: int
    total: int
    latents: torch.Tensor
    clean: Callable[[], torch.Tensor]


OnStep = Callable[[Step], None]


def watched(scheduler: Any, on_step: OnStep) -> Any:
    """A view of a private scheduler that says so after every step.

    Every pipeline calls `scheduler.step` once per step, whatever callbacks it has.
    """
    view = object.__new__(_watched_class(type(scheduler)))
    view.__dict__ = {**vars(scheduler), _ON_STEP: on_step, _DONE: 0}
    return view


_ON_STEP, _DONE = "_omni_on_step", "_omni_steps_done"


@cache
def _watched_class(cls: type) -> type:
    @wraps(cls.step)  # pipelines look at its parameters for `generator` and `eta`
    def step(
        self: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kw: Any
    ) -> Any:
        result = cls.step(self, model_output, timestep, sample, *args, **kw)
        own = vars(self)
        own[_DONE] += 1
        latents = result[0] if isinstance(result, tuple) else result.prev_sample
        clean = partial(_clean, self, model_output, sample, latents, result)
        own[_ON_STEP](Step(own[_DONE], len(self.timesteps), latents, clean))
        return result

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        """A copy that says nothing: LTX-2 makes the same steps for its sound with one."""
        plain = object.__new__(cls)
        memo[id(self)] = plain
        own = {n: value for n, value in vars(self).items() if n not in (_ON_STEP, _DONE)}
        plain.__dict__ = copy.deepcopy(own, memo)
        return plain

    return disguised(cls, {"step": step, "__deepcopy__": __deepcopy__})


def _clean(scheduler: Any, model_output: Any, sample: Any, latents: Any, result: Any) -> Any:
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and scheduler.step_index:
        sigma = scheduler.sigmas[scheduler.step_index - 1]
        return sample - sigma.to(sample.device, sample.dtype) * model_output
    if not isinstance(result, tuple) and "pred_original_sample" in result:
        return result.pred_original_sample
    if isinstance(result, tuple) and len(result) > 1 and isinstance(result[1], torch.Tensor):
        return result[1]
    return latents
