# SPDX-License-Identifier: Apache-2.0
"""Writes trained weights as a checkpoint that diffusers' `from_pretrained` and the server load.

python -m recipes.demo.image.export --weights weights.safetensors --out demo-image
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import Lumina2Pipeline
from safetensors.torch import load_file

from recipes.demo.image.model import caption_tokenizer, pipeline_of, untrained


def trained(weights: Path) -> Lumina2Pipeline:
    """The pipeline of the weights that train.py wrote, in float16."""
    tokenizer = caption_tokenizer()
    parts = untrained(len(tokenizer))
    state = load_file(weights)
    for component, module in parts.named().items():
        own = {
            name.removeprefix(f"{component}."): weight
            for name, weight in state.items()
            if name.startswith(f"{component}.")
        }
        module.load_state_dict(own)
        module.to(torch.float16).eval()
    facts = json.loads(weights.with_name("training.json").read_text())
    return pipeline_of(parts, tokenizer, scaling=facts["scaling"], shift=facts["shift"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    trained(given.weights).save_pretrained(given.out, safe_serialization=True)
    size = sum(file.stat().st_size for file in given.out.rglob("*") if file.is_file())
    print(f"{given.out}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
