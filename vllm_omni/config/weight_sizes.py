# SPDX-License-Identifier: Apache-2.0
"""How much a stage's weights take, from the headers of its safetensors files: nothing is loaded."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from vllm_omni.config.pipeline import Pipeline, Stage
from vllm_omni.config.plan import StagePlan
from vllm_omni.config.prefetch.files import needed_files
from vllm_omni.errors import OmniConfigError

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Of a number, by its type in a safetensors header; those that are missing take one."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that are converted to the stage's own."""
_HALF = 2
"""Bytes of a number where the stage's type is left to the model: it may be as small as this."""
_OWN_SIZE = ("quantization", "hf_overrides", "cpu_offload_gb")
"""Engine arguments with which the checkpoint's tensors do not say what is loaded."""

Header = tuple[str, int, str]
"""Of a tensor: name, count of numbers, type."""


def weight_bytes(pipeline: Pipeline, stage: StagePlan) -> int:
    """Bytes that the weights of a stage take at least, all of its devices together.

    Args:
        pipeline: The stage's.
        stage: What is to be loaded.

    Returns:
        0 where the files do not say it: they are not here yet, they are damaged or of another kind,
        or nothing tells which of their tensors are this stage's.
    """
    model, settings = _settings(stage)
    if settings.get("load_format", "auto") == "dummy" or any(map(settings.get, _OWN_SIZE)):
        return 0
    folder = _folder(model, settings)
    if folder is None:
        return 0
    try:
        tensors = list(_tensors(model, folder, bool(settings.get("trust_remote_code"))))
    except (OmniConfigError, SafetensorError, OSError):
        return 0  # whoever loads them says what is wrong
    number = 4 if settings.get("dtype") in ("float32", "float") else _HALF
    return sum(
        count * (min(_BYTES.get(kind, 1), number) if kind in _FLOATS else _BYTES.get(kind, 1))
        for _, count, kind in _own(tensors, pipeline, stage.stage)
    )


def _settings(stage: StagePlan) -> tuple[str, Mapping[str, Any]]:
    if stage.diffusion is None:
        return stage.engine_args["model"], stage.engine_args
    own = stage.diffusion
    return own.model, {
        "load_format": own.load_format,
        "dtype": own.dtype,
        "revision": own.revision,
        "trust_remote_code": own.trust_remote_code,
    }


def _folder(model: str, settings: Mapping[str, Any]) -> Path | None:
    """Where the checkpoint is on this machine."""
    if Path(model).is_dir():
        return Path(model)
    try:
        found = snapshot_download(
            model,
            revision=settings.get("revision"),
            cache_dir=settings.get("download_dir"),
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError):  # ValueError: no name that the hub could have
        return None
    return Path(found)


def _tensors(model: str, folder: Path, trusted: bool) -> Iterator[Header]:
    """Of the one copy of the weights that is read.

    Raises:
        OmniConfigError: The checkpoint has no weights that may be read.
        SafetensorError: A file is damaged.
        OSError: A file is not there.
    """
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    needed = needed_files(model, names, folder, weights=True, trusted=trusted)
    for name in needed.vital:
        if name.endswith(".safetensors"):
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    tensor = file.get_slice(key)
                    yield key, math.prod(tensor.get_shape()), tensor.get_dtype()


def _own(tensors: Iterable[Header], pipeline: Pipeline, stage: Stage) -> list[Header]:
    """A stage's: those named as its part of the config (`talker_config`: `talker.*`), or all of the
    only stage."""
    if stage.config_name is not None:
        prefix = stage.config_name.removesuffix("_config") + "."
        if own := [tensor for tensor in tensors if tensor[0].startswith(prefix)]:
            return own
    return list(tensors) if len(pipeline.stages) == 1 else []
