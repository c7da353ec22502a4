# SPDX-License-Identifier: Apache-2.0
"""What a family of tiny diffusers checkpoints is: how it is made, and how it is asked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PROMPT = "a red square on a white ground"
NEGATIVE_PROMPT = "blurry"


@dataclass(frozen=True, slots=True)
class Example:
    """A small request to one pipeline class.

    Attributes:
        pipeline: Name of the class in diffusers that loads the checkpoint.
        guidance: The argument that scales guidance; None where the pipeline takes none.
        negative: The pipeline takes a negative prompt.
        prompt: The pipeline takes a prompt.
        sized: The pipeline takes `height` and `width`; otherwise the input image says the size.
        image: The argument that takes the input image, if any.
        mask: The argument that takes the mask (white is painted anew), if any.
        images: Input images, as one `PIL.Image` (1) or as a list (more).
        image_mode: PIL mode of the input images.
        fixed: Further arguments, always the same.
        heavy: The smallest request takes seconds: the pipeline chooses sizes or lengths itself.
        output: The field of the pipeline's output with the result.
        needs: Packages without which diffusers cannot run the pipeline.
    """

    pipeline: str
    guidance: str | None = "guidance_scale"
    negative: bool = True
    prompt: bool = True
    sized: bool = True
    image: str | None = None
    mask: str | None = None
    images: int = 1
    image_mode: str = "RGB"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    heavy: bool = False
    output: str = "images"
    needs: tuple[str, ...] = ()

    def arguments(
        self,
        prompt: str = PROMPT,
        *,
        negative_prompt: str = NEGATIVE_PROMPT,
        height: int = 32,
        width: int = 32,
        steps: int = 2,
        guidance: float = 3.0,
        image_seed: int = 0,
    ) -> dict[str, Any]:
        """Keyword arguments of the stock `__call__`; `generator` and `output_type` are up to you.

        Args:
            image_seed: What the input images show.
        """
        arguments: dict[str, Any] = {"num_inference_steps": steps, **self.fixed}
        if self.prompt:
            arguments["prompt"] = prompt
        if self.negative:
            arguments["negative_prompt"] = negative_prompt
        if self.guidance is not None:
            arguments[self.guidance] = guidance
        if self.sized:
            arguments |= {"height": height, "width": width}
        if self.image is not None:
            pictures = [
                picture(height, width, image_seed + index, self.image_mode)
                for index in range(self.images)
            ]
            arguments[self.image] = pictures[0] if self.images == 1 else pictures
        if self.mask is not None:
            arguments[self.mask] = left_half(height, width)
        return arguments


@dataclass(frozen=True, slots=True)
class Recipe:
    """One checkpoint on disk.

    Attributes:
        make: Builds the pipeline in memory, with weights that `weights.randomize` then redraws.
        examples: A request for each pipeline class that the checkpoint serves; the first is the
            class in `model_index.json`.
        tune: What is done to the redrawn weights, without gradients.
    """

    make: Callable[[], "DiffusionPipeline"]
    examples: tuple[Example, ...]
    tune: Callable[[Any], None] = lambda pipeline: None


def picture(height: int, width: int, seed: int, mode: str = "RGB") -> Image.Image:
    """A smooth picture with a few colours that depends on `seed` only."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, len(mode)), dtype=np.uint8)
    return Image.fromarray(coarse, mode).resize((width, height), Image.Resampling.BICUBIC)


def left_half(height: int, width: int) -> Image.Image:
    """A mask: the left half white, the right half black."""
    mask = np.zeros((height, width), dtype=np.uint8)
    mask[:, : width // 2] = 255
    return Image.fromarray(mask)
