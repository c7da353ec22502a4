# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: which there are, which are on the device, and which one is at work.

Weights of the model stay as they are. diffusers (through peft) puts a layer around each that an
adapter changes; with no adapter active it passes its input straight to the layer inside. What is
active is a property of a model, so requests with different adapters, or with one at different
strengths, never share a forward: each is a variant of the model (`variants.py`).

An adapter is loaded when it is first needed. If there are too many, the one that was used least
recently goes, even if a request that still runs uses it: its next forward loads it again.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import FluxLoraLoaderMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.utils import set_adapter_layers, set_weights_and_activate_adapters
from torch import nn

from vllm_omni.config.problems import did_you_mean
from vllm_omni.diffusion.failures import is_out_of_memory
from vllm_omni.diffusion.spec import LoadContext
from vllm_omni.errors import OmniClientError, OmniConfigError, OmniGenerateError
from vllm_omni.generation import Lora

logger = logging.getLogger(__name__)


class UnfitAdapterError(OmniGenerateError):
    """The file holds no adapter for this model."""


@dataclass(frozen=True, slots=True)
class Active:
    """What a component runs with.

    Attributes:
        path: The adapter.
        scale: Its strength.
    """

    path: str
    scale: float


@dataclass(frozen=True, slots=True)
class Resident:
    """An adapter on the device.

    Attributes:
        name: What peft calls it.
        components: Those that it changes.
    """

    name: str
    components: frozenset[str]


class Adapters:
    """The adapters of one replica.

    Args:
        pipeline: What they are loaded into.
        known: Path of each adapter that requests may name.
        default: Of requests that name none.
        max_resident: Most adapters on the device.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        known: Mapping[str, str],
        default: Active | None = None,
        max_resident: int = 8,
    ) -> None:
        self._pipeline = pipeline
        self._models = {n: m for n, m in pipeline.components.items() if isinstance(m, nn.Module)}
        self._known = known
        self._default = default
        self._max_resident = max_resident
        self._resident: OrderedDict[str, Resident] = OrderedDict()
        self._active: dict[str, Active | None] = {}
        self._serial = count()

    @classmethod
    def of(cls, pipeline: DiffusionPipeline, ctx: LoadContext) -> "Adapters":
        """The adapters that a deployment names; the default one is loaded.

        Raises:
            OmniConfigError: The pipeline takes none, or a file is missing or does not fit.
        """
        default = None if ctx.lora_path is None else Active(ctx.lora_path, ctx.lora_scale)
        if (ctx.lora_modules or default) and not isinstance(pipeline, LoraBaseMixin):
            key = "lora_modules" if ctx.lora_modules else "lora_path"
            raise OmniConfigError(f"{key}: {type(pipeline).__name__} takes no LoRA adapters")
        for name, path in ctx.lora_modules.items():
            if _is_local(path) and not Path(path).exists():
                raise OmniConfigError(f"lora_modules.{name}: there is no {path}")
        adapters = cls(pipeline, ctx.lora_modules, default, ctx.max_loras)
        if default is not None:
            try:
                adapters._loaded(default.path)
            except UnfitAdapterError as error:
                reason = error if error.__cause__ is None else error.__cause__
                raise OmniConfigError(f"lora_path = {default.path!r}: {reason}") from error
        return adapters

    @property
    def resident(self) -> tuple[str, ...]:
        """Paths of those on the device, the least recently used first."""
        return tuple(self._resident)

    def wanted(self, lora: Lora | None) -> Mapping[str, Active]:
        """What a request's components are to run with, by name; those not in here with none.

        Raises:
            OmniClientError: There is no such adapter.
            UnfitAdapterError: It is none for this model.
        """
        active = self._default if lora is None else self._asked_for(lora)
        if active is None:
            return {}
        return dict.fromkeys(self._loaded(active.path).components, active)

    def _asked_for(self, lora: Lora) -> Active:
        path = self._known.get(lora.name) if lora.path is None else lora.path
        if path is None:
            known = ", ".join(self._known) or "none"
            raise OmniClientError(
                f"`lora.name`: there is no adapter {lora.name!r}"
                f"{did_you_mean(lora.name, self._known)} (known: {known})",
                param="lora.name",
            )
        if not isinstance(self._pipeline, LoraBaseMixin):
            raise OmniClientError(
                f"`lora`: {type(self._pipeline).__name__} takes no adapters", param="lora"
            )
        return Active(path, lora.scale)

    def activate(self, component: str, wanted: Active | None) -> None:
        """Let a component run with an adapter from now on, or with none."""
        if wanted is not None:
            adapter = self._loaded(wanted.path)
        if component in self._active and self._active[component] == wanted:
            return
        model = self._models[component]
        self._active.pop(component, None)
        set_adapter_layers(model, enabled=wanted is not None)
        if wanted is not None:
            set_weights_and_activate_adapters(model, [adapter.name], [wanted.scale])
        self._active[component] = wanted

    @torch.inference_mode()
    def _loaded(self, path: str) -> Resident:
        found = self._resident.get(path)
        if found is not None:
            self._resident.move_to_end(path)
            return found
        while len(self._resident) >= self._max_resident:
            _, oldest = self._resident.popitem(last=False)
            self._remove(oldest.name)
        adapter = self._resident[path] = self._load(path)
        logger.info("Adapter %s is loaded into %s", path, ", ".join(sorted(adapter.components)))
        return adapter

    def _load(self, path: str) -> Resident:
        name = f"adapter_{next(self._serial)}"
        folder, file = _located(path)
        pipeline: Any = self._pipeline
        try:
            if isinstance(pipeline, FluxLoraLoaderMixin):
                _check_leaves_weights(pipeline, folder, file)
            pipeline.load_lora_weights(
                folder, weight_name=file, adapter_name=name, use_safetensors=True
            )
        except Exception as error:
            # Whatever is wrong with a file: peft and diffusers raise what they run into.
            self._remove(name)
            if is_out_of_memory(error):
                raise
            # Not all of it is for clients: it may name folders.
            logger.error("Adapter %s cannot be loaded: %s", path, error)
            raise UnfitAdapterError(
                f"{self._called(path)} cannot be loaded ({type(error).__name__}; see the log)"
            ) from error
        finally:
            self._active.clear()  # loading activates what is loaded
        components = self._changed_by(name)
        if not components:
            self._remove(name)
            raise UnfitAdapterError(
                f"{self._called(path)} has no weights for {type(pipeline).__name__}"
            )
        return Resident(name, components)

    def _called(self, path: str) -> str:
        names = [name for name, known in self._known.items() if known == path]
        return f"adapter {names[0] if names else path!r}"

    def _remove(self, name: str) -> None:
        for component in self._changed_by(name):
            self._active.pop(component, None)
        pipeline: Any = self._pipeline
        pipeline.delete_adapters(name)

    def _changed_by(self, name: str) -> frozenset[str]:
        """Components with weights of an adapter."""
        return frozenset(
            component
            for component, model in self._models.items()
            if any(f".{name}." in parameter for parameter, _ in model.named_parameters())
        )


def _is_local(path: str) -> bool:
    return Path(path).is_absolute() or path.startswith((".", "~"))


def _located(path: str) -> tuple[str, str | None]:
    """Folder and file; the file of a name on the hub, or of an ambiguous folder, is diffusers'
    guess."""
    place = Path(path).expanduser()
    if place.is_file():
        return str(place.parent), place.name
    files = sorted(file.name for file in place.glob("*.safetensors"))
    return (str(place) if place.exists() else path), files[0] if len(files) == 1 else None


def _check_leaves_weights(pipeline: FluxLoraLoaderMixin, folder: str, file: str | None) -> None:
    """Refuse FLUX's control adapters: they replace weights of the model itself, for everyone."""
    weights = pipeline.lora_state_dict(folder, weight_name=file, use_safetensors=True)
    shapes = {name: tensor.shape for name, tensor in pipeline.transformer.named_parameters()}
    for key, tensor in weights.items():
        module, _, rest = key.removeprefix("transformer.").partition(".lora_A")
        width = shapes.get(f"{module}.weight") or shapes.get(f"{module}.base_layer.weight")
        wider = bool(rest) and width is not None and tensor.shape[-1] != width[-1]
        if wider or ("lora" not in key and "norm" in key):
            raise UnfitAdapterError(f"{key}: it changes the model's own weights")
