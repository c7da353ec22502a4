# SPDX-License-Identifier: Apache-2.0
"""What a scheduler's steps tell about a request: how far it is, and its latents on the way."""

from collections.abc import Callable
from typing import Any

import torch

OnStep = Callable[[int, int, Any], None]
"""(steps done, steps in all, what the step returned)"""


def watched(scheduler: Any, on_step: OnStep) -> Any:
    """A view of a private scheduler that says so after every step.

    Every pipeline calls `scheduler.step` once per step, whatever callbacks it has.
    """
    cls = type(scheduler)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = cls.step(self, *args, **kwargs)
        view.steps_done += 1
        on_step(view.steps_done, _steps(self), result)
        return result

    members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "step": step}
    view_class = type(cls)(cls.__name__, (cls,), members)
    view = object.__new__(view_class)
    view.__dict__ = scheduler.__dict__
    view.steps_done = 0
    return view


def _steps(scheduler: Any) -> int:
    timesteps = scheduler.timesteps
    return len(timesteps) if isinstance(timesteps, torch.Tensor | list) else 0


def previous_sample(result: Any) -> torch.Tensor:
    """The latents after a step, from what `scheduler.step` returned."""
    return result[0] if isinstance(result, tuple) else result.prev_sample
