# SPDX-License-Identifier: Apache-2.0
"""Pictures of more than eight bits."""

import io

import numpy as np
import pytest
from PIL import Image

from vllm_omni.connectors.serialization import decode
from vllm_omni.entrypoints.generation_inputs import generation_input
from vllm_omni.generation import OmniDiffusionSamplingParams
from vllm_omni.media.decode import decode_image

pytestmark = [pytest.mark.core_model, pytest.mark.cpu]

GREY = np.random.default_rng(0).integers(0, 256, (8, 12), dtype=np.uint8)
DEEP = Image.fromarray(GREY.astype(np.uint16) * 257)


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_grey_of_16_bits_is_the_same_grey(kind: str) -> None:
    """Pillow's own conversion makes it white."""
    file = io.BytesIO()
    DEEP.save(file, kind)
    assert (np.asarray(decode_image(file.getvalue()).convert("L")) == GREY).all()


@pytest.mark.parametrize("medium", ["image", "mask_image"])
def test_grey_of_16_bits_from_python(medium: str) -> None:
    prompt = {"prompt": "x", "multi_modal_data": {medium: DEEP}}
    span = generation_input(prompt, OmniDiffusionSamplingParams(seed=1)).spans[0]
    (pixels,) = decode(span.handle.inline).values()
    assert (pixels.numpy().reshape(8, 12, -1) == GREY[..., None]).all()
