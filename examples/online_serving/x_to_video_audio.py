# SPDX-License-Identifier: Apache-2.0
"""Make a video with its own sound from a text, and a picture to begin with if there is one.

Usage: python x_to_video_audio.py "a drummer in the rain" [--image first.png] [--out heard.mp4]
"""

import argparse
import os
from pathlib import Path

import httpx


def main() -> None:
    """Make it in one request, which waits for the whole file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, help="the first frame")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--size", default="768x512")
    parser.add_argument("--frames", type=int, default=121)
    parser.add_argument("--fps", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("heard.mp4"))
    args = parser.parse_args()
    fields = {
        "prompt": args.prompt,
        "size": args.size,
        "num_frames": args.frames,
        "fps": args.fps,
        "num_inference_steps": args.steps,
        "seed": 1,
    }
    # A form of several parts, with a file or without.
    parts = {name: (None, str(value)) for name, value in fields.items()}
    if args.image:
        parts["input_reference"] = (args.image.name, args.image.read_bytes())
    key = os.environ.get("OPENAI_API_KEY", "none")
    reply = httpx.post(
        f"{args.url}/videos/sync",
        files=parts,
        headers={"Authorization": f"Bearer {key}"},
        timeout=1800,
    )
    if reply.is_error:
        raise SystemExit(reply.text)
    args.out.write_bytes(reply.content)
    print(f"{args.out} after {reply.headers['X-Inference-Time-S']} s")


if __name__ == "__main__":
    main()
