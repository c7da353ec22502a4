# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as somebody wrote them: names, types and ranges, with the one at fault.

One check serves deploy files and flags (when the deployment is planned), Python callers and HTTP
requests. vLLM is the authority on types and ranges.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
import regex as re
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError

from vllm_omni.config.problems import did_you_mean

INTERNAL = frozenset({"output_text_buffer_length", "skip_clone"})
"""Fields of `SamplingParams` that are vLLM's own business."""
SAMPLING_KEYS = (
    frozenset(name for name in SamplingParams.__struct_fields__ if name[0] != "_") - INTERNAL
)
"""Parameters that can be given."""
SUBTALKER = "subtalker_sampling_params"
"""Key of `extra_args` that says how a talker's frames are drawn."""


LEAST_PENALTY, MOST_PENALTY = 1e-3, 1e3
"""Of `repetition_penalty`: logits times or by it, in float32, have to stay finite."""


class SamplingError(ValueError):
    """A sampling parameter is unknown or wrong.

    Attributes:
        key: Which one; None if it is their combination.
        message: What is wrong, without the key.
    """

    def __init__(self, key: str | None, message: str) -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.key = key
        self.message = message


class SubtalkerSampling(msgspec.Struct):
    """How to draw the further codes of a talker's frame, with the defaults of a sampled one.

    Attributes:
        guidance_scale: Of classifier-free guidance, in models that have it; None for the model's
            own.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 50
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None


def sampling_params(given: Mapping[str, Any], base: Mapping[str, Any]) -> SamplingParams:
    """vLLM's parameters: `given` over `base`.

    Args:
        given: What somebody wrote; checked.
        base: Parameters that were checked before.

    Raises:
        SamplingError: One of `given` is unknown or wrong.
    """
    typed = {key: _typed(key, value) for key, value in given.items()}
    try:
        params = SamplingParams(**{**base, **typed})
    except (VLLMClientError, ValueError, TypeError) as error:
        message = str(error.args[0]) if error.args else str(error)
        key = _culprit(error, message, typed, base)
        raise SamplingError(key, message) from error
    _check_penalty(params)
    return params


def check_types(params: SamplingParams) -> None:
    """Check a whole object's types, which its constructor does not, and an engine core must have.

    Raises:
        SamplingError: One is wrong.
    """
    for key, wanted in _types().items():
        value, default = getattr(params, key), _defaults()[key]
        if value is not default and not (type(value) is type(default) and value == default):
            _converted(key, value, wanted)
    _check_penalty(params)


def _check_penalty(params: SamplingParams) -> None:
    given = params.repetition_penalty
    if not LEAST_PENALTY <= given <= MOST_PENALTY:
        allowed = f"{LEAST_PENALTY:g} to {MOST_PENALTY:g}"
        raise SamplingError("repetition_penalty", f"should be {allowed}, got {given:g}")


_OBJECTS = ("kv_transfer_params", "ec_transfer_params")
"""Extra arguments that vLLM's engine takes for mappings, unseen."""


def check_extra_args(given: Mapping[str, Any] | None) -> None:
    """Check those extra arguments that an engine reads as they are.

    Raises:
        SamplingError: One is wrong; its key is the argument's name.
    """
    for key in _OBJECTS:
        value = (given or {}).get(key)
        if value is not None and not isinstance(value, Mapping):
            raise SamplingError(key, f"should be an object, not {type(value).__name__}")


def check_subtalker(given: Any) -> None:
    """Check `subtalker_sampling_params`.

    Raises:
        SamplingError: With the dotted path of the parameter from `extra_args` down.
    """
    path = f"extra_args.{SUBTALKER}"
    if not isinstance(given, Mapping):
        raise SamplingError(path, "should be a mapping")
    types = {field.name: field.type for field in msgspec.structs.fields(SubtalkerSampling)}
    for key, value in given.items():
        if key not in types:
            raise SamplingError(f"{path}.{key}", f"unknown parameter{did_you_mean(key, types)}")
        _converted(f"{path}.{key}", value, types[key])


@cache
def _types() -> Mapping[str, Any]:
    fields = msgspec.structs.fields(SamplingParams)
    return {field.name: field.type for field in fields if field.name in SAMPLING_KEYS}


@cache
def _defaults() -> Mapping[str, Any]:
    params = SamplingParams()
    return {key: getattr(params, key) for key in SAMPLING_KEYS}


def _typed(key: str, value: Any) -> Any:
    if key not in SAMPLING_KEYS:
        hint = did_you_mean(str(key), SAMPLING_KEYS)
        raise SamplingError(str(key), f"unknown sampling parameter{hint}")
    return _converted(key, value, _types()[key])


def _converted(key: str, value: Any, wanted: Any) -> Any:
    if type(value) is wanted and wanted is not int:
        return value  # msgspec converts enums from their values only
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SamplingError(key, f"should be a 64-bit integer, got {value}")
    try:
        return msgspec.convert(value, wanted, str_keys=True)
    except (msgspec.ValidationError, VLLMClientError, ValueError, TypeError) as error:
        message = str(error).replace("Expected", "expected", 1)
        raise SamplingError(key, message) from error


def _culprit(
    error: Exception, message: str, given: Mapping[str, Any], base: Mapping[str, Any]
) -> str | None:
    """Which of `given` an error is about: the one it names, else the first that fails alone."""
    if isinstance(error, VLLMValidationError) and error.parameter in given:
        return error.parameter
    named = next((word for word in re.findall(r"\w+", message) if word in given), None)
    return named or next((key for key in given if _fails({**base, key: given[key]})), None)


def _fails(values: Mapping[str, Any]) -> bool:
    try:
        SamplingParams(**values)
    except (VLLMClientError, ValueError, TypeError):
        return True
    return False
