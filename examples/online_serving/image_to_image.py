# SPDX-License-Identifier: Apache-2.0
"""Change a picture as a text says, with OpenAI's client.

Usage: python image_to_image.py photo.png "make it snow" [--mask mask.png] [--out changed.png]
"""

import argparse
import base64
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Change it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--mask", type=Path, help="what is white in it is painted anew")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--size", default="auto", help="default: the picture's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("changed.png"))
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    reply = client.images.edit(
        image=args.image,
        prompt=args.prompt,
        size=args.size,
        extra_body={"num_inference_steps": args.steps, "seed": 1},
        **({"mask": args.mask} if args.mask else {}),
    )
    args.out.write_bytes(base64.b64decode(reply.data[0].b64_json or ""))
    print(args.out)


if __name__ == "__main__":
    main()
