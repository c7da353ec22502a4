# SPDX-License-Identifier: Apache-2.0
"""Reading deploy files and stage overrides."""

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from vllm_omni.config.merge import merge_deploy, merge_stage
from vllm_omni.config.pipeline import Pipeline
from vllm_omni.config.problems import (
    Problem,
    config_error,
    did_you_mean,
    from_validation_error,
)
from vllm_omni.config.schema import DeployConfig, StageOverride
from vllm_omni.errors import OmniConfigError

PACKAGED = "vllm_omni.deploy"


class LoadedDeploy(NamedTuple):
    """A deploy config and the name of the place it came from."""

    config: DeployConfig
    source: str


class UnknownDeployError(OmniConfigError):
    """There is no deploy file of that name.

    Args:
        name: As the user wrote it.
        known: Names of packaged ones that it may have meant.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, known = name, list(known)
        hint = did_you_mean(name.removesuffix(".yaml"), known)
        super().__init__(
            f"deploy config {name!r} is neither a file nor a packaged one "
            f"({', '.join(known) or 'there are none'}){hint}"
        )


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes a key given twice for the mistake that it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            name, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(name, str) and name != "<<" and name in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {name!r} was already given in line {seen[name]}",
                    key_node.start_mark,
                )
            if isinstance(name, str):
                seen[name] = line
        return super().construct_mapping(node, deep)


def packaged_deploys() -> dict[str, Path]:
    """Deploy files that come with the package, by pipeline name."""
    folder = Path(str(files(PACKAGED)))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_deploy(name: str | Path) -> Path:
    """The path of a deploy file: a path, or the name of a packaged one."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    packaged = packaged_deploys()
    stem = str(name).removesuffix(".yaml")
    if stem in packaged:
        return packaged[stem]
    raise UnknownDeployError(str(name), packaged)


def load_deploy(
    source: str | Path | Mapping[str, Any] | DeployConfig | None, platform: str | None = None
) -> LoadedDeploy:
    """A deploy config from a file, a packaged file's name, a mapping or an object.

    Args:
        source: What to load; a mapping may have a `base_config` too.
        platform: Apply each file's overlay of this platform to that file, so that a file wins over
            its base whatever the base says about the platform. None keeps all overlays.
    """
    if source is None:
        return LoadedDeploy(DeployConfig(), "deploy config")
    if isinstance(source, DeployConfig):
        source = source.as_mapping()
    if isinstance(source, Mapping):
        raw = _with_bases(dict(source), "deploy config", Path.cwd(), (), platform)
        return LoadedDeploy(DeployConfig.parse(raw, "deploy config"), "deploy config")
    path = find_deploy(source)
    raw = _read_with_bases(path, (), platform)
    return LoadedDeploy(DeployConfig.parse(raw, str(path)), str(path))


def _flattened(raw: Mapping[str, Any], platform: str | None) -> dict[str, Any]:
    """A mapping with the overlay of `platform` applied and all overlays gone."""
    if platform is None:
        return dict(raw)
    raw = dict(raw)
    overlay = (raw.pop("platforms", None) or {}).get(platform) or {}
    return merge_deploy(raw, overlay)


def _read_with_bases(path: Path, chain: tuple[Path, ...], platform: str | None) -> dict[str, Any]:
    path = path.resolve()
    if path in chain:
        names = " -> ".join(p.name for p in (*chain, path))
        raise OmniConfigError(f"{path}: base_config: files build on each other: {names}")
    return _with_bases(_read_yaml(path), str(path), path.parent, (*chain, path), platform)


def _with_bases(
    raw: dict[str, Any],
    where: str,
    folder: Path,
    chain: tuple[Path, ...],
    platform: str | None,
) -> dict[str, Any]:
    DeployConfig.parse(raw, where)
    base = raw.pop("base_config", None)
    own = _flattened(raw, platform)
    if base is None:
        return own
    base_path = folder / base
    if not base_path.is_file():
        base_path = packaged_deploys().get(base.removesuffix(".yaml"), base_path)
    if not base_path.is_file():
        raise OmniConfigError(
            f"{where}: base_config = {base!r}: there is neither a file {base_path} nor a packaged "
            f"one of that name ({', '.join(packaged_deploys())})"
        )
    return merge_deploy(_read_with_bases(base_path, chain, platform), own)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OmniConfigError(f"{path}: not valid YAML: {error}") from error
    except OSError as error:
        raise OmniConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise OmniConfigError(f"{path}: should be a mapping of keys, not a {type(raw).__name__}")
    return raw


def parse_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise OmniConfigError(
            f"{where}: not valid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(raw, dict):
        raise OmniConfigError(f"{where}: should be a JSON object, not {raw!r}")
    return raw


def find_stage(pipeline: Pipeline, name: str, where: str) -> int:
    """The id of the stage that is called by its id or its name."""
    names = [stage.name for stage in pipeline.stages]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    known = ", ".join(f"{i} ({n})" for i, n in enumerate(names))
    raise OmniConfigError(
        f"{where}: pipeline {pipeline.name!r} has no stage {name!r}{did_you_mean(name, names)}; "
        f"stages are {known}"
    )


_DOTTED = re.compile(r"stage_(?P<stage>\d+)_(?P<key>\w+)|(?P<name>\w+)\.(?P<field>\w+)")


def split_dotted(key: str) -> tuple[str, str] | None:
    """`stage_1_max_num_seqs` or `talker.max_num_seqs` as stage and key."""
    match = _DOTTED.fullmatch(key)
    if match is None:
        return None
    return match["stage"] or match["name"], match["key"] or match["field"]


def parse_overrides(
    overrides: str | Mapping[str, Any] | None, pipeline: Pipeline, where: str
) -> dict[int, StageOverride]:
    """Overrides by stage id.

    Args:
        overrides: `{"1": {"max_num_seqs": 4}}`, `{"talker": {...}}` or
            `{"stage_1_max_num_seqs": 4}`, as a mapping or JSON.
        pipeline: Whose stages they name.
        where: Names the place in errors.
    """
    if isinstance(overrides, str):
        overrides = parse_json(overrides, where)
    by_stage: dict[int, dict[str, Any]] = {}
    labels: dict[int, str] = {}
    for key, value in (overrides or {}).items():
        dotted = split_dotted(str(key))
        label, values = dotted[0] if dotted else str(key), value
        stage_id = find_stage(pipeline, label, where)
        if dotted:
            values = {dotted[1]: value}
        elif not isinstance(value, Mapping):
            problem = Problem(label, value, "should be a mapping of stage keys")
            raise config_error(where, [problem])
        labels.setdefault(stage_id, label)
        by_stage[stage_id] = merge_stage(by_stage.get(stage_id, {}), values)
    return {i: _override(values, where, labels[i]) for i, values in sorted(by_stage.items())}


def _override(values: Mapping[str, Any], where: str, label: str) -> StageOverride:
    try:
        return StageOverride.model_validate(values)
    except ValidationError as error:
        raise from_validation_error(where, error, (label,)) from None
