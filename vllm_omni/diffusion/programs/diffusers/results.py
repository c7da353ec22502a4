# SPDX-License-Identifier: Apache-2.0
"""What a pipeline returned, as tensors to send."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_omni.diffusion.failures import check_finite
from vllm_omni.errors import OmniGenerateError

FRAMES = ("frames", "videos", "video")
IMAGES = ("images", "image", "sample")
SOUNDS = ("audios", "audio", "sound")


def tensors_of(result: Any, output_type: str) -> dict[str, torch.Tensor]:
    """The parts of a pipeline's output by modality, on the CPU.

    Args:
        result: What `__call__` returned: a `BaseOutput`.
        output_type: See `OmniDiffusionSamplingParams`.

    Returns:
        `image` uint8 [n, h, w, channels], `video` uint8 [n, frames, h, w, channels] and `audio`
        float32 [n, channels, samples]; floats in diffusers' own layout if the output type is `pt`;
        whatever the pipeline has as `latents` if it is `latent`.

    Raises:
        OmniGenerateError: The numbers are not finite, or there are none at all.
    """
    fields = dict(result.items()) if isinstance(result, Mapping) else {"images": result}
    made: dict[str, torch.Tensor] = {}
    for modality, names in (("image", IMAGES), ("video", FRAMES), ("audio", SOUNDS)):
        value = next((fields[n] for n in names if fields.get(n) is not None), None)
        if value is not None:
            made[modality] = stacked(value)
    if not made:
        raise OmniGenerateError("the pipeline made nothing")
    check_finite(made)  # bytes would hide it
    if output_type == "latent":
        return {("audio" if n == "audio" else "latents"): t.cpu() for n, t in made.items()}
    if output_type == "pt":
        return {name: tensor.float().cpu() for name, tensor in made.items()}
    return {name: _shown(name, tensor) for name, tensor in made.items()}


def stacked(value: Any) -> torch.Tensor:
    """One tensor out of a tensor, an array, a picture, or (nested) lists of them."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, list | tuple):
        return torch.stack([stacked(each) for each in value])
    return torch.from_numpy(np.array(value))


def _shown(modality: str, tensor: torch.Tensor) -> torch.Tensor:
    if modality == "audio":
        sound = tensor.float().cpu()
        return sound[:, None] if sound.ndim == 2 else sound
    pixels = tensor
    if pixels.is_floating_point():
        # As diffusers makes pictures of floats.
        pixels = (pixels.float() * 255).round().clamp(0, 255).to(torch.uint8)
        pixels = _channels_last(pixels)
    wanted = 4 if modality == "image" else 5
    if pixels.ndim > wanted:  # layers of one picture are pictures
        pixels = pixels.flatten(0, pixels.ndim - wanted)
    return pixels.contiguous().cpu()


def _channels_last(pixels: torch.Tensor) -> torch.Tensor:
    if pixels.shape[-3] in (1, 3, 4) and pixels.shape[-1] not in (1, 3, 4):
        return pixels.movedim(-3, -1)
    return pixels
