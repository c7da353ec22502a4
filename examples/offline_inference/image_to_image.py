# SPDX-License-Identifier: Apache-2.0
"""Change a picture as a text says.

Usage: python image_to_image.py --model Qwen/Qwen-Image-Edit photo.png "make it snow"
"""

import argparse
from pathlib import Path

from PIL import Image

from vllm_omni import Omni, OmniDiffusionSamplingParams


def main() -> None:
    """Change it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="Qwen/Qwen-Image-Edit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("changed.png"))
    args = parser.parse_args()
    picture = Image.open(args.image).convert("RGB")
    request = {"prompt": args.prompt, "multi_modal_data": {"image": picture}}
    params = OmniDiffusionSamplingParams(num_inference_steps=args.steps, seed=1)
    with Omni(model=args.model) as omni:
        (output,) = omni.generate(request, params)
        output.images[0].save(args.out)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
