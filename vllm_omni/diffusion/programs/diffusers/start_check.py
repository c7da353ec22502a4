# SPDX-License-Identifier: Apache-2.0
"""Whether a pipeline still makes the same after something about its kernels was changed.

A small request, alone and two prompts of different lengths together, runs through the stock
pipeline. Its latents after two steps are compared with those of the same request before.
"""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline

from vllm_omni.diffusion.programs.diffusers.kit import Kit
from vllm_omni.diffusion.tensor_trees import iter_tensors
from vllm_omni.errors import OmniClientError

logger = logging.getLogger(__name__)

SIZE: Mapping[str, int] = {"height": 256, "width": 320, "num_frames": 9}
"""Pixels and frames; those that may differ do, so that what is compiled keeps them apart."""
STEPS = 2
PROMPTS = ("a cat", "a red square on a white ground, seen from far above in the evening")
BOUNDS: Mapping[torch.dtype, float] = {torch.float32: 1e-3}
"""Largest difference of latents, as a share of their norm, by the models' type."""
LOW_PRECISION_BOUND = 5e-2
"""The same for types of 8 or 11 significant bits."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,  # of torch and its compiler
    TypeError,
    ValueError,
)
"""What kernels, compilers and pipelines raise that cannot do something."""


@dataclass(frozen=True, slots=True)
class StartCheck:
    """The request and what it makes by diffusers' defaults.

    Attributes:
        pipeline: With the models themselves.
        reference: Latents of each run; None if the pipeline makes nothing of prompts alone.
    """

    pipeline: DiffusionPipeline
    reference: list[torch.Tensor] | None

    @classmethod
    def of(cls, kit: Kit) -> "StartCheck":
        """Run the request with things as they are."""
        try:
            pipeline = kit.apart(kit.choose(()))
        except OmniClientError as error:
            logger.info("Kernels are not checked: %s", error)
            return cls(kit.base, None)
        try:
            reference = _latents(pipeline)
        except FAILURES as error:
            logger.info("Kernels are not checked: %s: %s", type(pipeline).__name__, error)
            return cls(pipeline, None)
        if all(bool(each.isfinite().all()) for each in reference):
            return cls(pipeline, reference)
        logger.warning("Kernels are not checked: %s makes NaN", type(pipeline).__name__)
        return cls(pipeline, None)

    def problem(self) -> str | None:
        """What is wrong with the result as things are now, if anything is.

        Raises:
            Exception: One of `FAILURES`.
        """
        if self.reference is None:
            return None
        bound = BOUNDS.get(self.pipeline.dtype, LOW_PRECISION_BOUND)
        for made, wanted in zip(_latents(self.pipeline), self.reference, strict=True):
            difference = float((made - wanted).norm() / wanted.norm())
            if not difference <= bound:
                return f"latents differ by {difference:.2g} of their norm, more than {bound:g}"
        return None


@torch.inference_mode()
def _latents(pipeline: DiffusionPipeline) -> list[torch.Tensor]:
    """Latents (float32) of one prompt, and of two together."""
    made = []
    for prompts in (PROMPTS[:1], PROMPTS):
        given: dict[str, Any] = {
            **SIZE,
            "prompt": list(prompts),
            "num_inference_steps": STEPS,
            "output_type": "latent",
            "generator": [torch.Generator().manual_seed(i) for i in range(len(prompts))],
            "return_dict": False,
        }
        known = inspect.signature(pipeline.__call__).parameters
        results = pipeline(**{name: value for name, value in given.items() if name in known})
        made += [tensor.float() for tensor in iter_tensors(results)]
    return made
