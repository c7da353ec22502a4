# SPDX-License-Identifier: Apache-2.0
"""Explicit flags (or keyword arguments of `Omni`) and the stages that they go to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from vllm_omni.config.engine_args import is_entry_only
from vllm_omni.config.idle import FLAG_IDLE, STAGE_IDLE, IdleKey
from vllm_omni.config.load import split_dotted
from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.config.plan import PIPELINE_SETTINGS
from vllm_omni.config.problems import Problem, config_error, from_validation_error
from vllm_omni.config.schema import StageOverride, flag_engines_of


@dataclass(frozen=True, slots=True)
class Flags:
    """Validated flags.

    Attributes:
        values: By key.
        dotted: Those of the form `stage_<id>_<key>`.
        idle: Those without effect.
        style: How errors write one; `{flag}` or `{key}` stands for its name.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    dotted: Mapping[str, Any] = field(default_factory=dict)
    idle: Mapping[str, IdleKey] = field(default_factory=dict)
    style: str = "--{flag}"

    def write(self, key: str) -> str:
        """A flag as the user wrote it."""
        return self.style.replace("{flag}", key.replace("_", "-")).replace("{key}", key)

    def for_stage(self, pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
        """The flags that go to a stage."""
        return {key: value for key, value in self.values.items() if takes(pipeline, stage, key)}


def takes(pipeline: Pipeline, stage: Stage, key: str) -> bool:
    """Whether a flag that names no stage goes to this one."""
    engines = flag_engines_of(key)
    if stage.engine not in engines:
        return False
    if key in PIPELINE_SETTINGS and "ar" in engines and stage.engine == "diffusion":
        return stage.takes_generation  # a codec's decoder is not meant
    return stage == pipeline.entry or not is_entry_only(key)


def parse_flags(given: Mapping[str, Any], style: str = "--{flag}") -> Flags:
    """Validate flags; None means not given.

    Raises:
        OmniConfigError: One is unknown or wrong.
    """
    style = style.replace("{name}", "{key}")
    given = {key: value for key, value in given.items() if value is not None}
    dotted = {key: value for key, value in given.items() if _is_dotted(key)}
    table = {**STAGE_IDLE, **FLAG_IDLE}
    idle = {key: table[key] for key in given if key in table}
    rest = {key: value for key, value in given.items() if key not in dotted and key not in idle}
    where = "command line" if "flag" in style else "argument"
    try:
        values = StageOverride.model_validate(rest)
    except ValidationError as error:
        raise from_validation_error(where, error) from None
    no_flags = [
        Problem(key, value, "belongs to one stage; give it in 'stages' or stage overrides")
        for key, value in rest.items()
        if not flag_engines_of(key)
    ]
    if no_flags:
        raise config_error(where, no_flags)
    return Flags(values.settings(), dotted, idle, style)


def _is_dotted(key: str) -> bool:
    return key.startswith("stage_") and split_dotted(key) is not None
