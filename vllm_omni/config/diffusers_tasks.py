# SPDX-License-Identifier: Apache-2.0
"""The pipeline classes that one checkpoint's components make, and the one that a request needs."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_omni.config.diffusers import call_parameters, family_of, model_index, pipeline_class
from vllm_omni.errors import OmniClientError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MEDIA: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "images", "input_images"),
    "last_image": ("last_image",),
    "mask_image": ("mask_image", "mask"),
    "control_image": ("control_image",),
    "video": ("video",),
    "mask_video": ("mask",),
    "reference_images": ("reference_images",),
    "audio": ("audio", "initial_audio_waveforms", "src_audio"),
    "pose_video": ("pose_video",),
    "face_video": ("face_video",),
}
"""Media of a request -> the parameters of `__call__` that take them, by preference."""

_CHANGED: Mapping[str, tuple[str, ...]] = {
    "image": ("Edit", "Img2Img", "Inpaint", "ImageToVideo", "Image2Video", "Layered", "I2V"),
    "mask_image": ("Inpaint",),
    "video": ("VideoToVideo",),
}
_RELATIVES: Mapping[str, tuple[str, ...]] = {
    "LTX2Pipeline": ("LTX2ImageToVideoPipeline",),
    "SkyReelsV2DiffusionForcingPipeline": (
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    ),
}


def media_parameter(cls: "type[DiffusionPipeline]", medium: str) -> str | None:
    """The parameter that takes a medium, if there is one."""
    return next((n for n in MEDIA.get(medium, ()) if n in call_parameters(cls)), None)


def choose(
    classes: "Iterable[type[DiffusionPipeline]]", media: Iterable[str]
) -> "type[DiffusionPipeline]":
    """The first class for a request with these media.

    Args:
        classes: The checkpoint's own one first.
        media: Their names.

    Raises:
        OmniClientError: None of them takes them, or one that is missing is needed.
    """
    classes, media = tuple(classes), tuple(media)
    fitting = [cls for cls in classes if _takes(cls, media)]
    if not fitting:
        own = classes[0]
        alone = [m for m in media if not any(_takes(cls, (m,)) for cls in classes)]
        unknown = (alone or [m for m in media if not _takes(own, (m,))])[0]
        raise OmniClientError(f"{own.__name__} takes no `{unknown}`", param=unknown)
    chosen = next((cls for cls in fitting if not _missing(cls, media)), None)
    if chosen is None:
        missing = _missing(fitting[0], media)[0]
        raise OmniClientError(f"{fitting[0].__name__} needs `{missing}`", param=missing)
    return chosen


def relatives(
    cls: "type[DiffusionPipeline]", config: Mapping[str, Any]
) -> "tuple[type[DiffusionPipeline], ...]":
    """Other classes that may be made of a checkpoint's components.

    Args:
        cls: The checkpoint's own one.
        config: Of the pipeline.
    """
    further = _RELATIVES.get(cls.__name__, ())
    if cls.__name__ == "WanPipeline" and config.get("expand_timesteps"):
        further = ("WanImageToVideoPipeline",)  # Wan 2.2 TI2V; others have weights for each task
    related = dict.fromkeys((*family_of(cls), *(pipeline_class(name) for name in further)))
    return tuple(each for each in related if each is not cls)


def lacking(cls: "type[DiffusionPipeline]", have: Collection[str]) -> list[str]:
    """What a class cannot be made without, and is not among these."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.name not in have]


@cache
def classes_of(
    model: str, revision: str | None, name: str
) -> "tuple[type[DiffusionPipeline], ...]":
    """The classes that a checkpoint can be loaded as, as far as its index tells.

    Args:
        model: Folder or hub name of the checkpoint.
        revision: On the hub.
        name: Of the class that it is loaded as.
    """
    own, index = pipeline_class(name), model_index(model, revision)
    have = {*index, *inspect.signature(own.__init__).parameters}
    return (own, *(each for each in relatives(own, index) if not lacking(each, have)))


def _takes(cls: "type[DiffusionPipeline]", media: Iterable[str]) -> bool:
    return all(media_parameter(cls, medium) is not None for medium in media)


def _missing(cls: "type[DiffusionPipeline]", media: Iterable[str]) -> list[str]:
    """Media that a pipeline cannot go without: parameters without a default, and pictures of
    pipelines whose names say that they change one."""
    given = {media_parameter(cls, medium) for medium in media}
    needed = []
    for medium in MEDIA:
        parameter = media_parameter(cls, medium)
        if parameter is None or parameter in given:
            continue
        required = call_parameters(cls)[parameter].default is inspect.Parameter.empty
        if required or (medium in _CHANGED and any(n in cls.__name__ for n in _CHANGED[medium])):
            needed.append(medium)
    return needed
