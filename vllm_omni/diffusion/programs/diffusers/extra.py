# SPDX-License-Identifier: Apache-2.0
"""`extra_args`: arguments of a pipeline's `__call__` that no field of a request stands for.

They come from outside, so each must be what the parameter's annotation says, and no way around the
bounds that the fields have.
"""

import inspect
import typing
from functools import cache
from typing import Any

from diffusers import DiffusionPipeline
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from vllm_omni.config.diffusers import call_parameters
from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniClientError
from vllm_omni.generation import MAX_FRAMES, MAX_OUTPUTS, MAX_SEED, MAX_STEPS

PRIVATE = frozenset(
    {
        "generator",
        "latents",
        "output_type",
        "return_dict",
        "callback",
        "callback_steps",
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        "prompt",
        "negative_prompt",
        "cross_attention_kwargs",
        "attention_kwargs",
        "joint_attention_kwargs",
    }
)
"""Parameters that `extra_args` may not name."""

MOST_OF: tuple[tuple[str, int], ...] = (
    ("seed", MAX_SEED),
    ("steps", MAX_STEPS),
    ("batch", MAX_OUTPUTS),
    ("per_prompt", MAX_OUTPUTS),
    ("reps", MAX_OUTPUTS),
    ("frames", MAX_FRAMES),
    ("length", 1 << 16),
    ("tokens", 1 << 16),
)
"""What a parameter's name has in it -> the largest number that it takes."""
MOST = 1 << 26
"""The largest number of all others (some are areas in pixels)."""


def extra_argument(cls: type[DiffusionPipeline], name: str, value: Any, fields: set[str]) -> Any:
    """The value for a parameter, as its annotation says.

    Args:
        cls: The pipeline's class.
        name: Of the parameter.
        value: Plain: numbers, text, lists, mappings.
        fields: Parameters that fields of a request stand for.

    Raises:
        OmniClientError: There is no such parameter, or the value is none for it.
    """
    known = call_parameters(cls)
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    open_to = [n for n, p in known.items() if p.kind in named and n not in PRIVATE]
    open_to = [n for n in open_to if "embeds" not in n and "latents" not in n]
    if name in fields and name in open_to:
        raise _at_fault(name, "should be given by its field, not as an extra argument")
    if name not in open_to:
        hint = did_you_mean(name, [n for n in open_to if n not in fields])
        raise _at_fault(name, f"{cls.__name__} takes no such argument{hint}")
    if value is None and isinstance(known[name].default, list | dict | None):
        return None  # which annotations of lists often leave out
    _check_numbers(name, value)
    adapter = _adapter(cls, name)
    if adapter is None:
        return value
    if isinstance(value, list) and _accepts(adapter, ""):
        raise _at_fault(name, "should be one text")
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _at_fault(name, first["msg"]) from None


@cache
def _adapter(cls: type[DiffusionPipeline], name: str) -> TypeAdapter[Any] | None:
    """Checks a parameter's value; None if it has no annotation that can be read."""
    try:
        hints = typing.get_type_hints(cls.__call__)
    except (NameError, TypeError):  # annotations that are no types
        return None
    if name not in hints:
        return None
    try:
        return TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        return TypeAdapter(hints[name])


def _accepts(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _check_numbers(name: str, value: Any) -> None:
    most = next((most for part, most in MOST_OF if part in name), MOST)
    if isinstance(value, int | float) and abs(value) > most:
        raise _at_fault(name, f"should be at most {most}")
    for each in value if isinstance(value, list) else ():
        _check_numbers(name, each)


def _at_fault(name: str, reason: str) -> OmniClientError:
    return OmniClientError(f"`extra_args.{name}`: {reason}", param=f"extra_args.{name}")
