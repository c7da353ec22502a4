# SPDX-License-Identifier: Apache-2.0
"""Ask about a picture and a sound; the answer is text, and no stage that speaks has part in it.

Usage: python x_to_text.py "What do you see and hear?" --image photo.jpg --audio voice.wav
"""

import argparse
from pathlib import Path
from typing import Any

import soundfile
from PIL import Image
from transformers import AutoProcessor
from vllm import SamplingParams

from vllm_omni import Omni


def main() -> None:
    """Ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--audio", type=Path)
    parser.add_argument("--model", default="Qwen/Qwen3-Omni-30B-A3B-Instruct")
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    media: dict[str, Any] = {}
    if args.image:
        media["image"] = Image.open(args.image).convert("RGB")
    if args.audio:
        samples, rate = soundfile.read(args.audio, dtype="float32", always_2d=True)
        media["audio"] = (samples.mean(axis=1), rate)
    content = [*({"type": kind} for kind in media), {"type": "text", "text": args.question}]
    text = AutoProcessor.from_pretrained(args.model).apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    with Omni(model=args.model) as omni:
        (output,) = omni.generate(
            {"prompt": text, "multi_modal_data": media},
            SamplingParams(max_tokens=args.max_tokens),
            output_modalities=["text"],
        )
        print(output.outputs[0].text)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
