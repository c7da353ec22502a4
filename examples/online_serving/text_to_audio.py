# SPDX-License-Identifier: Apache-2.0
"""Make a sound or a piece of music from a text.

Usage: python text_to_audio.py "rain on a tin roof" [--seconds 10] [--out sound.wav]
"""

import argparse
import os
from pathlib import Path

import httpx


def main() -> None:
    """Make it; the file's name says in which format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("sound.wav"))
    args = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    reply = httpx.post(
        f"{args.url}/audio/generate",
        json={
            "input": args.prompt,
            "audio_length": args.seconds,
            "num_inference_steps": args.steps,
            "seed": 1,
            "response_format": args.out.suffix.removeprefix("."),
        },
        headers={"Authorization": f"Bearer {key}"},
        timeout=600,
    )
    if reply.is_error:
        raise SystemExit(reply.text)
    args.out.write_bytes(reply.content)
    print(args.out)


if __name__ == "__main__":
    main()
