# SPDX-License-Identifier: Apache-2.0
"""Paint pictures, all prompts at once.

Usage: python text_to_image.py --model Qwen/Qwen-Image "a red cat" "a blue dog"
"""

import argparse
from pathlib import Path

from vllm_omni import Omni, OmniDiffusionSamplingParams


def main() -> None:
    """Paint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="Qwen/Qwen-Image")
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder")
    args = parser.parse_args()
    params = OmniDiffusionSamplingParams(
        height=args.height, width=args.width, num_inference_steps=args.steps, seed=1
    )
    with Omni(model=args.model) as omni:
        for number, output in enumerate(omni.generate(args.prompts, params)):
            output.images[0].save(args.out / f"{number}.png")


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
