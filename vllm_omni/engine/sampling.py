# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of each stage: family and deployment defaults, the request's, constraints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import SamplingParams

from vllm_omni.config.sampling import (
    SUBTALKER,
    SamplingError,
    check_extra_args,
    check_subtalker,
    check_types,
    sampling_params,
)
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
        elif key == "min_tokens":  # who asks for fewer in all gets fewer
            least = value if params.max_tokens is None else min(value, params.max_tokens)
            params.min_tokens = max(params.min_tokens, least)
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
        with _blamed_on(field):
            check_types(override)
        if override.extra_args is None and base.extra_args is not None:
            override = override.clone()
            override.extra_args = base.extra_args
        return override
    if not isinstance(override, Mapping):
        raise OmniClientError(
            f"{field}: should be SamplingParams, a mapping or None, not {type(override).__name__}",
            param=field,
        )
    defaults = {name: getattr(base, name) for name in _REQUEST_FIELDS}
    if isinstance(most := override.get("max_tokens"), int):  # who asks for less gets less
        defaults["min_tokens"] = min(base.min_tokens, max(most, 0))
    return overlaid(override, defaults, field)


def overlaid(given: Mapping[str, Any], base: Mapping[str, Any], field: str) -> SamplingParams:
    """A request's parameters over those of its stage, types and ranges checked.

    Args:
        given: What the request says.
        base: The stage's own.
        field: Name of the request field that holds `given`.

    Raises:
        OmniClientError: Names the parameter at fault.
    """
    with _blamed_on(field):
        return sampling_params(given, base)


def check_extra(params: SamplingParams, field: str) -> None:
    """Check the free-form arguments that an engine reads.

    Args:
        params: Of one stage.
        field: Name of the request field that holds them.

    Raises:
        OmniClientError: Names the argument at fault.
    """
    with _blamed_on(field):
        check_extra_args(params.extra_args)


def check_frames(params: SamplingParams, field: str) -> None:
    """Check how a talker's frames are to be drawn.

    Raises:
        OmniClientError: Names the parameter at fault.
    """
    frames = (params.extra_args or {}).get(SUBTALKER)
    if frames is not None:
        with _blamed_on(field):
            check_subtalker(frames)


@contextmanager
def _blamed_on(field: str) -> Iterator[None]:
    try:
        yield
    except SamplingError as error:
        param = f"{field}.{error.key}" if error.key else field
        raise OmniClientError(f"`{param}`: {error.message}", param=param) from error


def route_defaults(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults as vLLM's own routes take them, from `override_generation_config`.

    `max_tokens` is left out: what vLLM finds there also limits what a request may ask for. Others
    (`seed`, `stop`, ...) have no default in vLLM's requests.
    """
    return {key: sampling[key] for key in _ROUTE_KEYS if sampling.get(key) is not None}


_ROUTE_KEYS: Sequence[str] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
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
