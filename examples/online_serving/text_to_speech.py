# SPDX-License-Identifier: Apache-2.0
"""Have a text spoken by a text-to-speech server, with OpenAI's client, and save it as it comes.

Usage: python text_to_speech.py [--url URL] [--voice NAME] [--out speech.wav] [TEXT]
"""

import argparse
import os
import time
from pathlib import Path

from openai import OpenAI


def main() -> None:
    """Speak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="Hello! This is spoken while it is made.")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--voice", default="default")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    began = time.monotonic()
    first = None
    with (
        client.audio.speech.with_streaming_response.create(
            model=model,
            voice=args.voice,
            input=args.text,
            response_format=args.out.suffix.removeprefix(".") or "wav",
        ) as reply,
        args.out.open("wb") as file,
    ):
        for piece in reply.iter_bytes():
            first = first or time.monotonic()
            file.write(piece)
    if first is not None:
        print(
            f"first sound after {first - began:.2f} s, all after {time.monotonic() - began:.2f} s"
        )
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
