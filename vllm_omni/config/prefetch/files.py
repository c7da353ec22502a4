# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint are needed: one copy of the weights, and what describes them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_omni.config.diffusers import MODEL_INDEX
from vllm_omni.errors import OmniConfigError

CONFIG = "config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
DESCRIPTIONS = (CONFIG, MODEL_INDEX, WEIGHTS_INDEX)
"""Files that decide which others are needed."""

_ROOT = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken"})
"""Suffixes of configs, tokenizers and chat templates."""
_CODE = ".py"
_PICKLES = (".bin", ".pt")
_OTHER_WEIGHTS = frozenset(
    {*_PICKLES, ".pth", ".ckpt", ".onnx", ".onnx_data", ".pb", ".xml", ".msgpack", ".h5", ".gguf"}
)
_SAFETENSORS = ".safetensors"
_PLAIN_WEIGHTS = re.compile(r"(diffusion_pytorch_)?model(-\d{5}-of-\d{5})?\.safetensors")
"""The names that diffusers and transformers save under; those of variants (`model.fp16...`),
which nobody asks for, differ."""
_OTHER_INDEX = re.compile(r"\.(bin|msgpack|h5)\.index\.|\.index\.[^.]+\.json$")


@dataclass(frozen=True, slots=True)
class Needed:
    """Names of files.

    Attributes:
        vital: Without them nothing can start.
        others: A checkpoint may be read without some of these.
    """

    vital: tuple[str, ...]
    others: tuple[str, ...]


def needed_files(
    model: str, names: Iterable[str], folder: Path, *, weights: bool, trusted: bool
) -> Needed:
    """Choose from a repository's files.

    Args:
        model: Its name, for errors.
        names: All that it has.
        folder: Has those of `DESCRIPTIONS` that there are.
        weights: Weights are needed.
        trusted: Code is, and pickles do if there are no safetensors.

    Raises:
        OmniConfigError: It has no weights that may be read, or a file cannot be understood.
    """
    names = sorted(names)
    components = _components(folder / MODEL_INDEX) if MODEL_INDEX in names else ()
    plain = CONFIG in names or not components
    chosen: list[str] = []
    if weights:
        if components:
            chosen += _component_weights(names, components)
        if plain:
            chosen += _plain_weights(names, folder / WEIGHTS_INDEX, trusted)
        if not chosen:
            fix = (
                "" if trusted else "; convert them, or trust pickled ones with --trust-remote-code"
            )
            raise OmniConfigError(f"model {model!r} has no weights in *.safetensors{fix}")
    vital = {*chosen, *(name for name in (CONFIG, MODEL_INDEX) if name in names)}
    others = {*_root_files(names, trusted), *_component_files(names, components)} - vital
    return Needed(tuple(sorted(vital)), tuple(sorted(others)))


def _components(index: Path) -> tuple[str, ...]:
    """Names of the folders of a diffusers pipeline."""
    return tuple(
        name
        for name, entry in _read(index).items()
        if isinstance(entry, list) and entry and entry[0] is not None
    )


def _component_weights(names: list[str], components: tuple[str, ...]) -> Iterator[str]:
    folders = {name.split("/")[0] for name in names if "/" in name}
    # A component without a folder has its files beside `model_index.json`.
    places = {*components} if folders >= {*components} else {*components, "."}
    for name in names:
        path = PurePosixPath(name)
        if str(path.parent) in places and _PLAIN_WEIGHTS.fullmatch(path.name):
            yield name


def _plain_weights(names: list[str], index: Path, trusted: bool) -> list[str]:
    """What vLLM reads: the files of the index, else all of one kind."""
    if WEIGHTS_INDEX in names:
        shards = _read(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise OmniConfigError(f"{index}: it has no weight_map")
        return sorted({str(name) for name in shards.values()})
    for suffix in (_SAFETENSORS, *(_PICKLES if trusted else ())):
        if found := [name for name in names if name.endswith(suffix)]:
            return found
    return []


def _root_files(names: list[str], trusted: bool) -> Iterator[str]:
    suffixes = {*_ROOT, _CODE} if trusted else _ROOT
    for name in names:
        if "/" in name or _OTHER_INDEX.search(name) is not None:
            continue
        if PurePosixPath(name).suffix in suffixes:
            yield name


def _component_files(names: list[str], components: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        folder, slash, _ = name.partition("/")
        suffix = PurePosixPath(name).suffix
        if not slash or folder not in components or _OTHER_INDEX.search(name) is not None:
            continue
        if suffix not in _OTHER_WEIGHTS and suffix != _SAFETENSORS:
            yield name


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OmniConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise OmniConfigError(f"{path} should be a mapping")
    return content
