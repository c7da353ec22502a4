# SPDX-License-Identifier: Apache-2.0
"""Make a video from a text.

Usage: python text_to_video.py --model Wan-AI/Wan2.2-TI2V-5B-Diffusers "a robot walks"
"""

import argparse
from pathlib import Path

from vllm_omni import Omni, OmniDiffusionSamplingParams
from vllm_omni.media.video_encode import write_video


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="Wan-AI/Wan2.2-TI2V-5B-Diffusers")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--frames", type=int, default=49)
    parser.add_argument("--fps", type=float, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("video.mp4"))
    args = parser.parse_args()
    params = OmniDiffusionSamplingParams(
        height=args.height,
        width=args.width,
        num_frames=args.frames,
        fps=args.fps,
        num_inference_steps=args.steps,
        seed=1,
    )
    with Omni(model=args.model) as omni:
        (output,) = omni.generate(args.prompt, params)
        write_video(args.out, output.video.frames[0], args.fps)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
