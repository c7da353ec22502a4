# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to what the engine is asked, and back from its errors to fields."""

from collections.abc import Mapping
from typing import Any

import regex as re

from vllm_omni.entrypoints.openai.protocol.diffusion import DiffusionRequest, at_fault
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import Lora, OmniDiffusionSamplingParams

_SAME = (
    *("num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale"),
    *("seed", "generator_device", "strength"),
)
"""Fields that the engine has by the same name."""
_OF_THE_SERVER = ("flow_shift", "boundary_ratio")
"""Fields of vLLM-Omni that change how all requests are made, so they are flags here."""
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
    body: DiffusionRequest, extra: Mapping[str, Any] | None = None, **more: Any
) -> OmniDiffusionSamplingParams:
    """What the engine is asked.

    Args:
        body: The request.
        extra: Arguments of the model's own pipeline, by fields of the request; None is left out.
        more: Further parameters.

    Raises:
        OmniClientError: A field is none of a request here.
    """
    for name in _OF_THE_SERVER:
        if getattr(body, name) is not None:
            flag = name.replace("_", "-")
            raise at_fault(name, f"is the same for all requests to this server: --{flag}")
    values = {name: getattr(body, name) for name in _SAME}
    own = {name: value for name, value in (extra or {}).items() if value is not None}
    asked = dict(body.extra_params or {})
    more |= {name: asked.pop(name) for name in _ONLY_EXTRA if name in asked}
    lora = body.lora and Lora(name=body.lora.name, path=body.lora.path, scale=body.lora.scale)
    return OmniDiffusionSamplingParams(**values, lora=lora, extra_args={**asked, **own}, **more)


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
    if first == "extra_args" and rest in type(body).model_fields:
        return rest  # a field of its own, such as `system_prompt`
    own = first.partition("[")[0]
    if own in _ONLY_EXTRA and own not in type(body).model_fields:
        return f"extra_params.{named}"
    if first in ("width", "height") and first not in body.model_fields_set:
        return "size"
    return names.get(first, first) + dot + rest
