# SPDX-License-Identifier: Apache-2.0
"""Set a picture in motion, in the background, with OpenAI's client.

Usage: python image_to_video.py photo.png "the cat yawns" [--size 832x480] [--out moved.mp4]
"""

import argparse
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Begin the video, wait for it, fetch it, and have the server forget it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--fps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("moved.mp4"))
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    video = client.videos.create_and_poll(
        prompt=args.prompt,
        input_reference=args.image,
        size=args.size,
        poll_interval_ms=500,
        extra_body={
            "num_frames": args.frames,
            "fps": args.fps,
            "num_inference_steps": args.steps,
            "seed": 1,
        },
    )
    if video.status != "completed":
        raise SystemExit(f"{video.status}: {video.error}")
    client.videos.download_content(video.id).write_to_file(args.out)
    client.videos.delete(video.id)
    print(args.out)


if __name__ == "__main__":
    main()
