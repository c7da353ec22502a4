# SPDX-License-Identifier: Apache-2.0
"""How calls of diffusers' and transformers' models are put together, by class.

A module of this package holds a family's rules in `RULES`: class name -> method -> `CallRules`. A
class without any has its `forward` (of a VAE: `encode` and `decode`) collated by default: tensors
with the batch's leading size are concatenated, all else must be equal.
"""

import logging
from collections.abc import Mapping
from importlib import import_module

from torch import nn

from vllm_omni.diffusion.rules import CallRules

logger = logging.getLogger(__name__)

FAMILIES = ("flux",)
"""Modules of this package."""

Rules = Mapping[str, Mapping[str, CallRules]]


def methods_of(module: nn.Module) -> Mapping[str, CallRules]:
    """The methods of a model that park, with their rules."""
    for cls in type(module).__mro__:
        if cls.__name__ in _RULES:
            return _RULES[cls.__name__]
    members = dir(type(module))
    if "encode" in members and "decode" in members:
        return {"encode": CallRules(), "decode": CallRules()}
    logger.info("%s has no batching rules: calls batch if they are alike", type(module).__name__)
    return {"forward": CallRules()}


def _collect() -> dict[str, Mapping[str, CallRules]]:
    found: dict[str, Mapping[str, CallRules]] = {}
    for family in FAMILIES:
        found.update(import_module(f"{__name__}.{family}").RULES)
    return found


_RULES = _collect()
