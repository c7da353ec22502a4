# SPDX-License-Identifier: Apache-2.0
"""What diffusers knows about a pipeline class: whether there is one, what it takes and makes."""

import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.config.problems import did_you_mean
from vllm_omni.errors import OmniConfigError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MODEL_INDEX = "model_index.json"
"""In place of `config.json`, in checkpoints of diffusers pipelines."""

_SOUND_LENGTHS = (
    "audio_end_in_s",
    "audio_length_in_s",
    "audio_duration",
    "audio_duration_s",
    "duration",
)
_VIDEO = ("num_frames", "num_videos_per_prompt")


def model_index(model: str, revision: str | None) -> dict[str, Any]:
    """What a diffusers checkpoint says about its pipeline.

    Raises:
        OmniConfigError: It has no such file, or the file names no pipeline class.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(model, MODEL_INDEX, revision=revision)
        assert path is not None  # else it has raised
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OmniConfigError(f"model {model!r}: {MODEL_INDEX} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("_class_name"), str):
        raise OmniConfigError(f"model {model!r}: {MODEL_INDEX} names no pipeline (_class_name)")
    return content


def pipeline_class(name: str) -> "type[DiffusionPipeline]":
    """The pipeline class of that name.

    Raises:
        OmniConfigError: diffusers has none.
    """
    import diffusers

    found = getattr(diffusers, name) if name in dir(diffusers) else None
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        known = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise OmniConfigError(
            f"model_class_name = {name!r}: diffusers {diffusers.__version__} has no such pipeline"
            f"{did_you_mean(name, known)}"
        )
    return found


@cache
def call_parameters(cls: "type[DiffusionPipeline]") -> Mapping[str, inspect.Parameter]:
    """Parameters of a pipeline's `__call__`."""
    return dict(list(inspect.signature(cls.__call__).parameters.items())[1:])


@cache
def family_of(cls: "type[DiffusionPipeline]") -> "tuple[type[DiffusionPipeline], ...]":
    """The classes for other tasks of the same family, by diffusers' own tables, without `cls`."""
    from diffusers.pipelines import auto_pipeline

    tables = (
        auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
        auto_pipeline.AUTO_TEXT2VIDEO_PIPELINES_MAPPING,
        auto_pipeline.AUTO_IMAGE2VIDEO_PIPELINES_MAPPING,
        auto_pipeline.AUTO_VIDEO2VIDEO_PIPELINES_MAPPING,
    )
    families = sorted({name for table in tables for name, each in table.items() if each is cls})
    related = [table[name] for table in tables for name in families if name in table]
    return tuple(each for each in dict.fromkeys(related) if each is not cls)


def arguments_of(cls: "type[DiffusionPipeline]") -> frozenset[str]:
    """What a pipeline's `__call__`, or one of its family, takes."""
    return frozenset(name for each in (cls, *family_of(cls)) for name in call_parameters(each))


def modality_of(cls: "type[DiffusionPipeline]") -> str:
    """What a pipeline makes: `video` if it counts frames, `audio` if it has only a length."""
    parameters = call_parameters(cls)
    if any(name in parameters for name in _VIDEO):
        return "video"
    if any(name in parameters for name in _SOUND_LENGTHS) and "width" not in parameters:
        return "audio"
    return "image"
