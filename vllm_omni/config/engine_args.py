# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own `AsyncEngineArgs` say about a stage key.

Every field of `AsyncEngineArgs` is a legal key of an autoregressive stage. vLLM is the authority on
its types; values of plain types (numbers, strings, literals, lists, mappings) are checked here,
so that a wrong value is reported with its place and not deep inside a worker.
"""

import enum
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import TypeAdapter, ValidationError

ENTRY_ONLY = frozenset(
    {
        "allowed_local_media_path",
        "allowed_media_domains",
        "default_mm_loras",
        "enable_lora",
        "enable_mm_embeds",
        "enable_prompt_embeds",
        "enable_tower_connector_lora",
        "fully_sharded_loras",
        "interleave_mm_strings",
        "io_processor_plugin",
        "kv_events_config",
        "kv_transfer_config",
        "language_model_only",
        "limit_mm_per_prompt",
        "logits_processors",
        "lora_dtype",
        "lora_modules",
        "lora_target_modules",
        "max_cpu_loras",
        "max_logprobs",
        "max_lora_rank",
        "max_loras",
        "media_io_kwargs",
        "reasoning_config",
        "reasoning_parser",
        "reasoning_parser_plugin",
        "renderer_num_workers",
        "skip_mm_profiling",
        "skip_tokenizer_init",
        "speculative_config",
        "structured_outputs_config",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "tokens_only",
        "video_pruning_method",
        "video_pruning_rate",
    }
)
"""Flags that make sense only for the stage that takes the client's prompt (and all of `mm_*`)."""

OWNED = {
    "device_ids": "devices are given by the stage key 'devices'",
    "scheduler_cls": "vLLM-Omni sets it",
    "worker_cls": "vLLM-Omni sets it",
}
"""Engine arguments that are not the user's to set, and why."""


def is_entry_only(name: str) -> bool:
    """Whether a flag of that name goes to the entry stage alone."""
    return name in ENTRY_ONLY or name.startswith("mm_")


@cache
def engine_arg_types() -> Mapping[str, Any]:
    """Public fields of `AsyncEngineArgs` with their types."""
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = dataclasses.fields(AsyncEngineArgs)
    hints = {f.name: f.type for f in fields if not f.name.startswith("_")}
    return types.MappingProxyType({k: v for k, v in hints.items() if k not in OWNED})


@cache
def engine_arg_defaults() -> Mapping[str, Any]:
    """Their defaults; fields with a default factory are left out."""
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    return types.MappingProxyType(
        {
            f.name: f.default
            for f in dataclasses.fields(AsyncEngineArgs)
            if f.default is not dataclasses.MISSING
        }
    )


def coerce_engine_arg(name: str, value: Any) -> Any:
    """The value as vLLM wants it.

    Raises:
        ValueError: It is of a plain type and wrong; the message says what is wanted.
    """
    annotation = engine_arg_types()[name]
    enums = [t for t in _alternatives(annotation) if _is_enum(t)]
    if isinstance(value, str) and enums:
        return _enum_member(enums[0], value)
    if value is None or not isinstance(value, (bool, int, float, str, list)):
        return value
    if not _is_plain(annotation):
        return value
    if isinstance(value, bool) and not _takes_bool(annotation):
        raise ValueError(f"should be {type_name(annotation)}, not a boolean")
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"should be {type_name(annotation)}") from error


def type_name(annotation: Any) -> str:
    """A type as a reader wants it: `int or null`, `'auto', 'hf' or str`."""
    names: list[str] = []
    for alternative in _alternatives(annotation):
        if typing.get_origin(alternative) is Literal:
            names += [repr(choice) for choice in typing.get_args(alternative)]
        elif alternative is type(None):
            names.append("null")
        elif typing.get_origin(alternative) is None:
            names.append(alternative.__name__ if isinstance(alternative, type) else "any")
        else:
            names.append(typing.get_origin(alternative).__name__)
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(a for arg in typing.get_args(annotation) for a in _alternatives(arg))
    if typing.get_origin(annotation) is Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    return (annotation,)


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def _enum_member(enumeration: type[enum.Enum], value: str) -> enum.Enum:
    members = {name.lower(): member for name, member in enumeration.__members__.items()}
    if value.lower() not in members:
        raise ValueError(f"should be one of {', '.join(enumeration.__members__)}")
    return members[value.lower()]


def _is_plain(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType, list, dict, set, tuple):
        return all(_is_plain(arg) for arg in typing.get_args(annotation))
    return origin is Literal or annotation in (bool, int, float, str, Any, type(None))


def _takes_bool(annotation: Any) -> bool:
    return any(
        alternative in (bool, Any)
        or any(isinstance(choice, bool) for choice in typing.get_args(alternative))
        for alternative in _alternatives(annotation)
    )
