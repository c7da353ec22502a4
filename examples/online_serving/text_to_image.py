# SPDX-License-Identifier: Apache-2.0
"""Paint a picture, and watch another one being painted, with OpenAI's client.

Usage: python text_to_image.py [--url http://localhost:8000/v1] [--size 1024x1024] [--steps 20]
"""

import argparse
import base64
import os
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Paint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--prompt", default="a red fox")
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    more = {"num_inference_steps": args.steps, "seed": 1}  # what OpenAI's API does not have

    reply = client.images.generate(prompt=args.prompt, size=args.size, extra_body=more)
    save("painted.png", reply.data[0].b64_json)

    for event in client.images.generate(
        prompt=args.prompt, size=args.size, stream=True, partial_images=2, extra_body=more
    ):
        print(event.type)  # two previews, then the picture
        save("watched.png", event.b64_json)


def save(name: str, data: str | None) -> None:
    """Write a picture that came in base64."""
    Path(name).write_bytes(base64.b64decode(data or ""))
    print(name)


if __name__ == "__main__":
    main()
