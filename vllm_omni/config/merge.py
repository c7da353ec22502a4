# SPDX-License-Identifier: Apache-2.0
"""Pure merges of configuration mappings (`base_config`, `platforms`, layers of one stage).

No function changes its arguments. Null stands for "not given" where a mapping or list is expected,
and for "back to the engine's default" where a value is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni.config.schema import ParallelConfig

PARALLEL = "parallel_config"
DEEP_KEYS = frozenset(
    {
        "default_sampling_params",
        "default_pooling_params",
        "subtalker_sampling_params",
        "engine_extras",
        "engine_args",
        PARALLEL,
    }
)
"""Stage keys whose mappings are merged key by key; any other stage key is replaced."""


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over`; where both have a mapping, these are merged likewise."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = deep_merge(old, value)
        else:
            merged[key] = value
    return merged


def merge_stage(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two sets of values for one stage, the later one first in precedence."""
    merged = _with_plain_sizes(base)
    for key, value in _with_plain_sizes(over).items():
        if key not in DEEP_KEYS:
            merged[key] = value
        elif value is not None:
            merged[key] = deep_merge(merged.get(key) or {}, value)
    return merged


def _with_plain_sizes(stage: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's values with the sizes in its `parallel_config` as keys of the stage, so that either
    form is over the other. No set of values gives a size in both."""
    sizes = stage.get(PARALLEL)
    if not isinstance(sizes, Mapping):
        return dict(stage)
    plain = {key: value for key, value in sizes.items() if key in ParallelConfig.model_fields}
    rest = {key: value for key, value in sizes.items() if key not in plain}
    return {**stage, **plain, PARALLEL: rest or None}


def merge_stages(
    base: Sequence[Mapping[str, Any]], over: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Two `stages` lists, matched by `stage_id`; stages that only one has keep their order."""
    merged = {stage["stage_id"]: dict(stage) for stage in base}
    for stage in over:
        merged[stage["stage_id"]] = merge_stage(merged.get(stage["stage_id"], {}), stage)
    return list(merged.values())


def merge_deploy(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two deploy mappings: a file over its `base_config`, or a platform overlay over a file."""
    merged = dict(base)
    for key, value in over.items():
        if key not in _MERGERS:
            merged[key] = value
        elif value is not None:
            merged[key] = _MERGERS[key](merged.get(key), value)
    return merged


def _merge_platforms(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: dict(overlay or {}) for name, overlay in base.items()}
    for name, overlay in over.items():
        merged[name] = merge_deploy(merged.get(name, {}), overlay or {})
    return merged


def _merge_overrides(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {str(stage): values for stage, values in base.items()}
    for stage, values in over.items():
        old = merged.get(str(stage))
        if isinstance(old, Mapping) and isinstance(values, Mapping):
            values = merge_stage(old, values)
        merged[str(stage)] = values
    return merged


_MERGERS = {
    "connectors": lambda base, over: deep_merge(base or {}, over),
    "stages": lambda base, over: merge_stages(base or (), over),
    "platforms": lambda base, over: _merge_platforms(base or {}, over),
    "stage_overrides": lambda base, over: _merge_overrides(base or {}, over),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Values for one stage from one place.

    Attributes:
        source: Names the place; `{key}` and `{flag}` stand for the key at hand.
        values: Values by key. A None counts as not given.
    """

    source: str
    values: Mapping[str, Any]

    def written(self, key: str) -> str:
        """The place of one of the keys."""
        return self.source.replace("{flag}", key.replace("_", "-")).replace("{key}", key)


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a key and where it came from."""

    value: Any
    source: str


def fold(layers: Iterable[Layer]) -> dict[str, Setting]:
    """The settings of one stage; a later layer wins. The values of `DEEP_KEYS` are merged."""
    settings: dict[str, Setting] = {}
    for layer in layers:
        for key, value in layer.values.items():
            if value is None or (key in DEEP_KEYS and not value):
                continue
            old = settings.get(key)
            if key in DEEP_KEYS and old is not None:
                value = deep_merge(old.value, value)
            settings[key] = Setting(value, layer.written(key))
    return settings
