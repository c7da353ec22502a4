# SPDX-License-Identifier: Apache-2.0
"""The noise schedule: its shift, where one expert hands over to the other, where an edit begins."""

from collections.abc import Mapping
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from vllm_omni.config.diffusers import call_parameters, modality_of
from vllm_omni.diffusion.programs.diffusers.kit import registered
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import OmniDiffusionSamplingParams

_SHIFTS = ("flow_shift", "shift")


def why_unshiftable(scheduler: Any) -> str | None:
    """Why a shift would change nothing, as the rest of a sentence; None if it would."""
    name = type(scheduler).__name__
    if not any(key in scheduler.config for key in _SHIFTS):
        return f"{name} has no shift"
    if scheduler.config.get("use_dynamic_shifting"):
        return f"{name} shifts by the size of what is made (use_dynamic_shifting)"
    return None


def shifted(scheduler: Any, shift: float) -> Any:
    """A scheduler with another shift; see `why_unshiftable`."""
    key = next(key for key in _SHIFTS if key in scheduler.config)
    return type(scheduler).from_config(scheduler.config, **{key: shift})


def why_no_boundary(pipeline: DiffusionPipeline) -> str | None:
    """Why a pipeline has no boundary between experts; None if it has."""
    if "boundary_ratio" in pipeline.config and registered(pipeline).get("transformer_2"):
        return None
    return f"{type(pipeline).__name__} has one expert, hence no boundary"


def set_schedule(
    pipeline: DiffusionPipeline, parts: Mapping[str, Any], params: OmniDiffusionSamplingParams
) -> None:
    """Put a request's schedule over the deployment's.

    Args:
        pipeline: The request's own.
        parts: The components by name, of which the pipeline has some.
        params: What the request says.

    Raises:
        OmniClientError: It would change nothing; names the field.
    """
    own = vars(pipeline)
    if params.flow_shift is not None:
        schedulers = [n for n, p in parts.items() if n in own and isinstance(p, SchedulerMixin)]
        reasons = [why_unshiftable(own[name]) for name in schedulers]
        if reason := next((reason for reason in reasons if reason), None):
            raise OmniClientError(f"`flow_shift`: {reason}", param="flow_shift")
        for name in schedulers:
            own[name] = shifted(own[name], params.flow_shift)
    if params.boundary_ratio is not None:
        if reason := why_no_boundary(pipeline):
            raise OmniClientError(f"`boundary_ratio`: {reason}", param="boundary_ratio")
        pipeline.register_to_config(boundary_ratio=params.boundary_ratio)


def check_strength(
    pipeline: DiffusionPipeline, arguments: Mapping[str, Any], steps: int | None
) -> None:
    """See that an edit has a step left; of so many it takes the share that `strength` says.

    Args:
        pipeline: The one to be called.
        arguments: Of the call.
        steps: Denoising steps that they ask for.

    Raises:
        OmniClientError: None is left; names `strength`.
    """
    cls, strength = type(pipeline), arguments.get("strength")
    if steps is None or strength is None or "get_timesteps" not in dir(cls):
        return
    if "denoise_strength" in call_parameters(cls):  # LTX: `strength` is how a picture is heeded
        return
    rounds_down = modality_of(cls) == "video" or "unet" in registered(pipeline)
    if (int(steps * strength) if rounds_down else strength) > 0:
        return
    least = f"at least {1 / steps:.2g}" if rounds_down else "above 0"
    raise OmniClientError(
        f"`strength`: {strength:g} of {steps} steps is none, so nothing would change; should be "
        f"{least}",
        param="strength",
    )
