# SPDX-License-Identifier: Apache-2.0
"""Text and a picture in; text and sound out, whole and streamed, with OpenAI's client.

python chat.py --url http://localhost:8000/v1 --image photo.jpg
"""

import argparse
import base64
import mimetypes
import os
from pathlib import Path
from typing import Any

from openai import OpenAI


def question(image: Path | None) -> list[dict[str, Any]]:
    """One user message, with a picture if there is one."""
    parts: list[dict[str, Any]] = []
    if image is not None:
        kind = mimetypes.guess_type(image.name)[0] or "image/jpeg"
        data = base64.b64encode(image.read_bytes()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
    text = "What is in the picture?" if image else "Tell me a short story."
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--voice", help="default: the model's own")
    parser.add_argument("--image", type=Path, help="picture to ask about")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the sound files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    request: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": question(args.image),
        "modalities": ["text", "audio"],
    }

    reply = client.chat.completions.create(**request, audio=sound(args.voice, "wav"))
    audio = reply.choices[0].message.audio
    print(audio.transcript)
    (args.out / "whole.wav").write_bytes(base64.b64decode(audio.data))

    stream = client.chat.completions.create(**request, audio=sound(args.voice, "mp3"), stream=True)
    with (args.out / "streamed.mp3").open("wb") as file:
        for chunk in stream:
            delta = chunk.choices[0].delta if chunk.choices else None
            if delta is None or delta.audio is None:
                continue
            print(delta.audio.transcript or "", end="", flush=True)
            file.write(base64.b64decode(delta.audio.data or ""))
    print()


def sound(voice: str | None, file_format: str) -> dict[str, str]:
    """OpenAI's `audio` parameter."""
    return {"format": file_format} | ({"voice": voice} if voice else {})


if __name__ == "__main__":
    main()
