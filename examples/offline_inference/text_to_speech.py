# SPDX-License-Identifier: Apache-2.0
"""Speak texts, all at once.

Usage: python text_to_speech.py --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice "Hello!" "Who is it?"
"""

import argparse
from pathlib import Path

import soundfile
from vllm import SamplingParams

from vllm_omni import Omni, SpeechRequest


def main() -> None:
    """Speak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--model", default="Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice")
    parser.add_argument("--voice", help="default: the model's own")
    parser.add_argument("--max-frames", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder")
    args = parser.parse_args()
    requests = [SpeechRequest(text=text, voice=args.voice) for text in args.texts]
    params = SamplingParams(max_tokens=args.max_frames, seed=1)
    with Omni(model=args.model) as omni:
        for number, output in enumerate(omni.generate(requests, params)):
            sound = output.audio
            soundfile.write(args.out / f"{number}.wav", sound.samples, sound.sample_rate)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
