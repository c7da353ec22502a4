# SPDX-License-Identifier: Apache-2.0
"""Ask about pictures, sounds and videos; the answer is text, as it is written.

Usage: python x_to_text.py "What is this?" photo.jpg voice.wav film.mp4
"""

import argparse
import base64
import mimetypes
import os
from pathlib import Path
from typing import Any

from openai import OpenAI


def part(path: Path) -> dict[str, Any]:
    """A file as a part of a message."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    data = base64.b64encode(path.read_bytes()).decode()
    medium = kind.partition("/")[0]
    if medium not in ("image", "audio", "video"):
        raise SystemExit(f"{path}: neither a picture nor a sound nor a video")
    return {"type": f"{medium}_url", f"{medium}_url": {"url": f"data:{kind};base64,{data}"}}


def main() -> None:
    """Ask, and print the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("media", nargs="*", type=Path)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    content = [*map(part, args.media), {"type": "text", "text": args.question}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        modalities=["text"],
        max_tokens=args.max_tokens,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
