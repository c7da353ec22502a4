# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of each stage: family and deployment defaults, the request's, constraints."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError

from vllm_omni.errors import OmniClientError


def default_params(defaults: Mapping[str, Any], constraints: Mapping[str, Any]) -> SamplingParams:
    """A stage's parameters when a request says nothing about it."""
    return constrain(SamplingParams(**defaults), constraints)


def constrain(params: SamplingParams, constraints: Mapping[str, Any]) -> SamplingParams:
    """Apply what the family demands whatever a request says; stop tokens are united.

    Returns a copy when there is something to apply.
    """
    if not constraints:
        return params
    params = params.clone()
    for key, value in constraints.items():
        if key == "stop_token_ids":
            params.stop_token_ids = sorted({*(params.stop_token_ids or ()), *value})
            params.all_stop_token_ids.update(value)
        else:
            setattr(params, key, value)
    return params


def merge_request(
    base: SamplingParams, override: SamplingParams | Mapping[str, Any] | None, field: str
) -> SamplingParams:
    """A stage's parameters with one request's on top.

    Args:
        base: The stage's defaults.
        override: Whole parameters, or a mapping of the ones that differ.
        field: Name of the request field, for error messages.

    Raises:
        OmniClientError: An unknown parameter or an illegal value.
    """
    if override is None:
        return base
    if isinstance(override, SamplingParams):
        if override.extra_args is None and base.extra_args is not None:
            override = override.clone()
            override.extra_args = base.extra_args
        return override
    known = set(SamplingParams.__struct_fields__)
    if unknown := sorted(set(override) - known):
        raise OmniClientError(f"unknown sampling parameters {unknown}", param=field)
    values = {name: getattr(base, name) for name in _REQUEST_FIELDS}
    try:
        return SamplingParams(**{**values, **override})
    except (ValueError, TypeError, VLLMClientError) as error:
        raise OmniClientError(str(error), param=field) from error


_REQUEST_FIELDS: Sequence[str] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "ignore_eos",
    "output_kind",
    "extra_args",
)
