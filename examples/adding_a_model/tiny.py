# SPDX-License-Identifier: Apache-2.0
"""A tiny random checkpoint in MMS-TTS's layout, made in a second: python tiny.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
from transformers import VitsConfig, VitsModel, VitsTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz'- "


def main(folder: Path) -> None:
    """Write it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {letter: index for index, letter in enumerate(["<pad>", *LETTERS])}
    words = folder / "vocab.json"
    words.write_text(json.dumps(vocabulary))
    config = VitsConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=16,
        duration_predictor_num_flows=2,
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
    )
    torch.manual_seed(0)
    VitsModel(config).save_pretrained(folder)
    VitsTokenizer(str(words), phonemize=False, language="eng").save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
