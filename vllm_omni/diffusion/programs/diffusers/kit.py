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

from vllm_omni.config.diffusers_tasks import choose, lacking, relatives
from vllm_omni.diffusion.program import Program
from vllm_omni.diffusion.proxy import disguised


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
        pipelines = (self.base, *self.siblings)
        cls = choose((type(each) for each in pipelines), media)
        return next(each for each in pipelines if type(each) is cls)

    def apart(self, pipeline: DiffusionPipeline) -> DiffusionPipeline:
        """A copy with the same models, whose schedulers and guiders are its own."""
        mine = object.__new__(type(pipeline))
        vars(mine).update(vars(pipeline), **self._own_state(pipeline))
        return mine

    def private(self, pipeline: DiffusionPipeline, program: Program) -> DiffusionPipeline:
        """A copy for one request: its models are proxies, its schedulers and guiders its own."""
        mine = object.__new__(_private_class(type(pipeline), program.device, tuple(self.parts)))
        own = vars(pipeline) | self._own_state(pipeline)
        for name, part in self.parts.items():
            if name in own and isinstance(part, nn.Module):
                own[name] = program.component(name)
        # Not by attribute: that would note each in the pipeline's config.
        vars(mine).update(own)
        return mine

    def _own_state(self, pipeline: DiffusionPipeline) -> dict[str, Any]:
        """Copies of what a request changes."""
        return {
            name: copy.deepcopy(part)
            for name, part in self.parts.items()
            if name in vars(pipeline) and isinstance(part, SchedulerMixin | BaseGuidance)
        }


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


def _siblings(base: DiffusionPipeline) -> Iterable[DiffusionPipeline]:
    for cls in relatives(type(base), base.config):
        if (sibling := _sibling(base, cls)) is not None:
            yield sibling


def _sibling(base: DiffusionPipeline, cls: type[DiffusionPipeline]) -> DiffusionPipeline | None:
    """A pipeline of another class over the same components, if they suffice.

    Not by diffusers' `from_pipe`, which casts the models.
    """
    have = {**dict(base.config), **registered(base)}
    if lacking(cls, have):
        return None
    parameters = inspect.signature(cls.__init__).parameters
    sibling = cls(**{name: have[name] for name in parameters if name in have})
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
