# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to what the engine is asked, and back from its errors to fields."""

from collections.abc import Mapping
from typing import Any

import regex as re

from vllm_omni.entrypoints.openai.protocol.diffusion import (
    DiffusionRequest,
    contradiction,
)
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import Lora, OmniDiffusionSamplingParams, checked_params

_SAME = (
    *("num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale"),
    *("seed", "generator_device", "strength", "flow_shift", "boundary_ratio"),
)
"""Fields that the engine has by the same name."""
_ONLY_EXTRA = ("sigmas", "max_sequence_length")
"""Fields of the engine that requests name in `extra_params`."""
_NAMED = re.compile(r"`([\w.]+)`")
_ENGINES_NAMES: Mapping[str, str] = {
    "extra_args": "extra_params",
    "num_outputs_per_prompt": "n",
    "mask_image": "mask",
}
_PREFIXES = ("sampling_params.", "multi_modal_data.", "prompt.")


def sampling_params(
    body: DiffusionRequest,
    extra: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    **more: Any,
) -> OmniDiffusionSamplingParams:
    """What the engine is asked.

    Args:
        body: The request.
        extra: Arguments of the model's own pipeline, by fields of the request; None is left out.
        names: See `in_fields_of`.
        more: Further parameters.

    Raises:
        OmniClientError: A field is out of its bounds, or two of them contradict each other.
    """
    values = {name: getattr(body, name) for name in _SAME}
    own = {name: value for name, value in (extra or {}).items() if value is not None}
    asked = body.extra()
    more |= {name: asked.pop(name) for name in _ONLY_EXTRA if name in asked}
    _check_steps(body, {**asked, **more})
    lora = body.lora and Lora(name=body.lora.name, path=body.lora.path, scale=body.lora.scale)
    args = {**asked, **own}
    params = OmniDiffusionSamplingParams(**{**values, **more}, lora=lora, extra_args=args)
    try:
        checked_params(params.given(), "")
    except OmniClientError as error:
        raise in_fields_of(error, body, names) from error
    return params


def _check_steps(body: DiffusionRequest, asked: Mapping[str, Any]) -> None:
    """See that a schedule has as many steps as were asked for: pipelines believe the schedule."""
    for name in ("sigmas", "timesteps"):
        levels, steps = asked.get(name), body.num_inference_steps
        if isinstance(levels, list) and steps is not None and len(levels) != steps:
            raise contradiction(_field(name, body, {}), "num_inference_steps")


def in_fields_of(
    error: OmniClientError, body: DiffusionRequest, names: Mapping[str, str] | None = None
) -> OmniClientError:
    """The engine's error in the words of the request.

    Args:
        error: Names the engine's parameter, in `param` or in its message.
        body: The request.
        names: Further names of the engine -> fields of the request.
    """
    named = error.param
    if named is None and (match := _NAMED.search(error.message)):
        named = match[1]
    if named is None:
        return error
    field = _field(named, body, {**_ENGINES_NAMES, **(names or {})})
    message = error.message
    if field != "size":  # of which the engine has two
        message = message.replace(f"`{named}`", f"`{field}`")
    if field.split(".")[0] not in message:
        message = f"{field}: {message}"
    return OmniClientError(
        message, error.status_code, error.error_type, param=field, code=error.code
    )


def _field(named: str, body: DiffusionRequest, names: Mapping[str, str]) -> str:
    for prefix in _PREFIXES:
        named = named.removeprefix(prefix)
    first, dot, rest = named.partition(".")
    own = (rest if first == "extra_args" else first).partition("[")[0]
    if own in body.unknown() or (first == "extra_args" and own in type(body).model_fields):
        return own  # given beside the fields, or a field of its own, such as `system_prompt`
    given = body.model_fields_set
    if own == "true_cfg_scale" and own not in given and "cfg_scale" in given:
        return "cfg_scale"
    own = first.partition("[")[0]
    if own in _ONLY_EXTRA and own not in type(body).model_fields:
        return f"extra_params.{named}"
    if first in ("width", "height") and first not in body.model_fields_set:
        return "size"
    return names.get(first, first) + dot + rest
