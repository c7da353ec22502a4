# SPDX-License-Identifier: Apache-2.0
"""The models that a checkpoint's `model_index.json` names, one by one."""

import importlib
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from transformers import PreTrainedModel

from vllm_omni.diffusion.spec import LoadContext


def named(index: Mapping[str, Any]) -> dict[str, list[str]]:
    """Library and class of each component that a checkpoint has, by name."""
    return {n: v for n, v in index.items() if isinstance(v, list) and v[0] is not None}


def component_class(library: str, class_name: str) -> type[nn.Module] | None:
    """A component's class if it is a model; None for tokenizers, schedulers and the like."""
    if library in ("diffusers", "transformers"):
        module: Any = {"diffusers": diffusers, "transformers": transformers}[library]
    else:  # a module of the pipeline's own package
        module = importlib.import_module(f"diffusers.pipelines.{library}")
    found = getattr(module, class_name) if class_name in dir(module) else None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def model_dtype(ctx: LoadContext) -> torch.dtype:
    """The type of the models' weights."""
    return ctx.dtype or (torch.float32 if ctx.device.type == "cpu" else torch.bfloat16)


def random_model(ctx: LoadContext, name: str, cls: type[nn.Module]) -> nn.Module | None:
    """A model with random weights, the same for every rank, straight on the device; None of a class
    that neither diffusers nor transformers loads."""
    torch.manual_seed(0)
    with torch.device(ctx.device):
        if issubclass(cls, ModelMixin):
            config = cls.load_config(ctx.model, subfolder=name, revision=ctx.revision)
            return cls.from_config(config).to(model_dtype(ctx))
        if issubclass(cls, PreTrainedModel):
            config = cls.config_class.from_pretrained(
                ctx.model, subfolder=name, revision=ctx.revision
            )
            return cls(config).to(model_dtype(ctx))
    return None
