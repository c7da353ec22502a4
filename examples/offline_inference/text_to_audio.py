# SPDX-License-Identifier: Apache-2.0
"""Make a sound or a piece of music from a text.

Usage: python text_to_audio.py --model stabilityai/stable-audio-open-1.0 "rain on a tin roof"
"""

import argparse
from pathlib import Path

import soundfile

from vllm_omni import Omni, OmniDiffusionSamplingParams


def main() -> None:
    """Make it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="stabilityai/stable-audio-open-1.0")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("sound.wav"))
    args = parser.parse_args()
    params = OmniDiffusionSamplingParams(
        audio_length=args.seconds, num_inference_steps=args.steps, seed=1
    )
    with Omni(model=args.model) as omni:
        (output,) = omni.generate(args.prompt, params)
        soundfile.write(args.out, output.audio.samples[0].T, output.audio.sample_rate)


if __name__ == "__main__":  # on a GPU, stages are processes that import this file
    main()
