# SPDX-License-Identifier: Apache-2.0
"""What the mappings of a deploy file have in common: their keys, and how they reject others."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from vllm_omni.config.engine_args import OWNED, coerce_engine_arg, engine_arg_types
from vllm_omni.config.idle import IdleKey
from vllm_omni.config.problems import UNKNOWN_KEYS, Problem, did_you_mean

Engine = Literal["ar", "diffusion"]
AR: tuple[Engine, ...] = ("ar",)
DIFFUSION: tuple[Engine, ...] = ("diffusion",)
BOTH: tuple[Engine, ...] = ("ar", "diffusion")


def key(
    description: str,
    *,
    engines: tuple[Engine, ...] = BOTH,
    flag: tuple[Engine, ...] = (),
    aliases: tuple[str, ...] = (),
    **constraints: Any,
) -> Any:
    """A key that is not set by default.

    Args:
        description: For the docs and the flag's help.
        engines: Engines of the stages on which it has an effect.
        flag: Engines of the stages that the command-line flag of the same name goes to.
        aliases: Other names of that flag.
        constraints: Pydantic's (`ge`, ...).
    """
    extra = {"engines": list(engines), "flag": list(flag), "aliases": list(aliases)}
    return Field(default=None, description=description, json_schema_extra=extra, **constraints)


class Section(BaseModel):
    """A mapping of the deploy file. It rejects unknown keys itself, to say them well."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
    idle_keys: ClassVar[Mapping[str, IdleKey]] = {}
    takes_engine_args: ClassVar[bool] = False
    misplaced: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        checked: dict[str, Any] = {}
        problems: list[Problem] = []
        for name, value in raw.items():
            if name in cls.model_fields or name in cls.idle_keys:
                checked[name] = value
                continue
            try:
                checked[str(name)] = cls._check_extra(str(name), value)
            except ValueError as error:
                problems.append(Problem(str(name), value, str(error)))
        if problems:
            raise PydanticCustomError(UNKNOWN_KEYS, "unknown keys", {"problems": problems})
        return checked

    @classmethod
    def _check_extra(cls, name: str, value: Any) -> Any:
        """The value of a key that is no field; ValueError if it is not allowed or wrong."""
        if cls.takes_engine_args and name in engine_arg_types():
            return coerce_engine_arg(name, value)
        if cls.takes_engine_args and name in OWNED:
            raise ValueError(f"may not be set: {OWNED[name]}")
        if name in cls.misplaced:
            raise ValueError(f"unknown key here: {cls.misplaced[name]}")
        raise ValueError("unknown key" + did_you_mean(name, cls.known_keys()))

    @classmethod
    def known_keys(cls) -> tuple[str, ...]:
        """All keys that the section takes; own ones first."""
        vllm = tuple(engine_arg_types()) if cls.takes_engine_args else ()
        return tuple(dict.fromkeys((*cls.model_fields, *cls.idle_keys, *vllm)))

    def given(self) -> dict[str, Any]:
        """Keys that were given a value, idle ones included."""
        names = [*(n for n in type(self).model_fields if n in self.model_fields_set)]
        values = {name: self.__dict__[name] for name in names} | (self.model_extra or {})
        return {name: value for name, value in values.items() if value is not None}
