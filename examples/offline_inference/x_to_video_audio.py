# SPDX-License-Identifier: Apache-2.0
"""Make a video with its own sound from a text, and a picture to begin with if there is one.

Usage: python x_to_video_audio.py --model Lightricks/LTX-2 "a drummer in the rain"
"""

import argparse
from pathlib import Path
from typing import Any

from PIL import Image

from vllm_omni import Omni, OmniDiffusionSamplingParams
from vllm_omni.media.video_encode import write_video


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, help="the first frame")
    parser.add_argument("--model", default="Lightricks/LTX-2")
    parser.add_argument("--height", type=int, default=512)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--frames", type=int, default=121)
    parser.add_argument("--fps", type=float, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("heard.mp4"))
    args = parser.parse_args()
    request: dict[str, Any] = {"prompt": args.prompt}
    if args.image:
        request["multi_modal_data"] = {"image": Image.open(args.image).convert("RGB")}
    params = OmniDiffusionSamplingParams(
        height=args.height,
        width=args.width,
        num_frames=args.frames,
        fps=args.fps,
        num_inference_steps=args.steps,
        seed=1,
    )
    with Omni(model=args.model) as omni:
        (output,) = omni.generate(request, params)
        video = output.video
        write_video(args.out, video.frames[0], args.fps, video.audio[0].T, video.sample_rate)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
