# SPDX-License-Identifier: Apache-2.0
"""How calls of diffusers' and transformers' models are put together, by class.

A module of this package holds a family's rules in `RULES`: class name -> method -> `CallRules`. A
class of transformers without any, and a VAE, take a batch of tensors as it comes: of them, calls of
equal shapes run together. Any other class without rules runs one call at a time.
"""

import logging
from collections.abc import Mapping
from importlib import import_module

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from vllm_omni.diffusion.programs.diffusers.rules.common import ALONE, ENCODER, INLINE, VAE
from vllm_omni.diffusion.rules import CallRules

logger = logging.getLogger(__name__)

FAMILIES = ("audio", "encoders", "flux", "image", "video")
"""Modules of this package."""

Rules = Mapping[str, Mapping[str, CallRules]]


def methods_of(module: nn.Module) -> Mapping[str, CallRules]:
    """The methods of a model that park, with their rules."""
    for cls in type(module).__mro__:
        if cls.__name__ in _RULES:
            return _RULES[cls.__name__]
    if isinstance(module, PreTrainedModel):
        methods = {"forward": ENCODER}
        return {**methods, "generate": INLINE} if isinstance(module, GenerationMixin) else methods
    members = dir(type(module))
    if "encode" in members and "decode" in members:
        return VAE
    if type(module).forward is nn.Module.forward:
        return {}  # Whatever else it can, e.g. check how safe a prompt is, runs in the program.
    logger.warning(
        "%s has no batching rules (%s): its calls run one at a time",
        type(module).__name__,
        __name__,
    )
    return {"forward": ALONE}


def _collect() -> dict[str, Mapping[str, CallRules]]:
    found: dict[str, Mapping[str, CallRules]] = {}
    for family in FAMILIES:
        found.update(import_module(f"{__name__}.{family}").RULES)
    return found


_RULES = _collect()
