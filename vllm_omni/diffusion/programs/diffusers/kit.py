# SPDX-License-Identifier: Apache-2.0
"""The pipelines that one checkpoint's components make, and the one that a request needs."""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.guiders import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import nn

from vllm_omni.config.diffusers import call_parameters, family_of, pipeline_class
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.proxy import disguised
from vllm_omni.errors import OmniClientError

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


def media_parameter(cls: type[DiffusionPipeline], medium: str) -> str | None:
    """The parameter that takes a medium, if there is one."""
    return next((n for n in MEDIA.get(medium, ()) if n in call_parameters(cls)), None)


def registered(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """The components of a pipeline by name; None where it has none.

    Its own `components` leaves out those whose constructor parameter has a default.
    """
    return {
        name: vars(pipeline)[name]
        for name, value in pipeline.config.items()
        if isinstance(value, list | tuple) and len(value) == 2 and name in vars(pipeline)
    }


@dataclass(frozen=True, slots=True)
class Kit:
    """A loaded checkpoint.

    Attributes:
        base: The pipeline as the checkpoint names it, with the models themselves.
        siblings: Pipelines of other classes over the same components.
        parts: The components by name.
        sample_rate: Hz of the sound that they make, if they make sound.
    """

    base: DiffusionPipeline
    siblings: tuple[DiffusionPipeline, ...]
    parts: Mapping[str, Any]
    sample_rate: int | None

    @classmethod
    def of(cls, base: DiffusionPipeline) -> "Kit":
        """A kit with every sibling that the components suffice for."""
        parts = registered(base)
        return cls(base, tuple(_siblings(base)), parts, _sample_rate(parts))

    def models(self) -> dict[str, nn.Module]:
        """The models by the name of the pipeline's component."""
        return {n: m for n, m in sorted(self.parts.items()) if isinstance(m, nn.Module)}

    def choose(self, media: Iterable[str]) -> DiffusionPipeline:
        """The pipeline for a request with these media.

        Raises:
            OmniClientError: None of them takes them, or one that is missing is needed.
        """
        media = tuple(media)
        fitting = [p for p in (self.base, *self.siblings) if _takes(type(p), media)]
        if not fitting:
            unknown = next(m for m in media if media_parameter(type(self.base), m) is None)
            raise OmniClientError(f"{type(self.base).__name__} takes no `{unknown}`", param=unknown)
        chosen = next((p for p in fitting if not _missing(type(p), media)), None)
        if chosen is None:
            missing = _missing(type(fitting[0]), media)[0]
            raise OmniClientError(f"{type(fitting[0]).__name__} needs `{missing}`", param=missing)
        return chosen

    def private(self, pipeline: DiffusionPipeline, program: Program) -> DiffusionPipeline:
        """A copy for one request: its models are proxies, its schedulers and guiders its own."""
        mine = object.__new__(_private_class(type(pipeline), program.device, tuple(self.parts)))
        own = dict(vars(pipeline))
        for name, part in self.parts.items():
            if name not in own:
                continue
            if isinstance(part, nn.Module):
                own[name] = program.component(name)
            elif isinstance(part, SchedulerMixin | BaseGuidance):
                own[name] = copy.deepcopy(part)
        # Not by attribute: that would note each in the pipeline's config.
        vars(mine).update(own)
        return mine


@cache
def _private_class(
    cls: type[DiffusionPipeline], device: torch.device, names: tuple[str, ...]
) -> type[DiffusionPipeline]:
    """The same class, but for what diffusers would search for anew each time it is asked: where it
    runs (all modules), and its components (all annotations of its constructor)."""

    def components(self: DiffusionPipeline) -> dict[str, Any]:
        own = vars(self)
        return {name: own[name] for name in names if name in own}

    members = {
        "device": property(lambda self: device),
        "_execution_device": property(lambda self: device),
        "components": property(components),
    }
    return disguised(cls, members)


def _takes(cls: type[DiffusionPipeline], media: Iterable[str]) -> bool:
    return all(media_parameter(cls, medium) is not None for medium in media)


def _missing(cls: type[DiffusionPipeline], media: Iterable[str]) -> list[str]:
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


_CHANGED: Mapping[str, tuple[str, ...]] = {
    "image": ("Edit", "Img2Img", "Inpaint", "ImageToVideo", "Image2Video", "Layered", "I2V"),
    "mask_image": ("Inpaint",),
    "video": ("VideoToVideo",),
}


def _siblings(base: DiffusionPipeline) -> Iterable[DiffusionPipeline]:
    related = (*family_of(type(base)), *(pipeline_class(name) for name in _relatives(base)))
    for cls in dict.fromkeys(related):
        if cls is not type(base) and (sibling := _sibling(base, cls)) is not None:
            yield sibling


def _relatives(base: DiffusionPipeline) -> tuple[str, ...]:
    """Classes for the same weights that are not in diffusers' tables."""
    if type(base).__name__ == "WanPipeline" and base.config["expand_timesteps"]:
        return ("WanImageToVideoPipeline",)  # Wan 2.2 TI2V; other Wans have weights for each task.
    return _RELATIVES.get(type(base).__name__, ())


_RELATIVES: Mapping[str, tuple[str, ...]] = {
    "LTX2Pipeline": ("LTX2ImageToVideoPipeline",),
    "SkyReelsV2DiffusionForcingPipeline": (
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    ),
}


def _sibling(base: DiffusionPipeline, cls: type[DiffusionPipeline]) -> DiffusionPipeline | None:
    """A pipeline of another class over the same components, if they suffice.

    Not by diffusers' `from_pipe`, which casts the models.
    """
    have = {**dict(base.config), **registered(base)}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    given = {p.name: have[p.name] for p in parameters if p.name in have}
    if any(p.default is p.empty and p.name not in given for p in parameters):
        return None
    sibling = cls(**given)
    sibling.set_progress_bar_config(disable=True)
    return sibling


def _sample_rate(parts: Mapping[str, Any]) -> int | None:
    for name, key in _RATES:
        part = parts.get(name)
        if part is None:
            continue
        config = part.config if isinstance(part.config, Mapping) else part.config.to_dict()
        if key in config:
            return int(config[key])
    return None


_RATES = (
    ("vocoder", "output_sampling_rate"),
    ("vocoder", "sampling_rate"),
    ("audio_vae", "sample_rate"),
    ("vae", "sampling_rate"),
    ("vae", "sample_rate"),
)
