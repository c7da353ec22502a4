# SPDX-License-Identifier: Apache-2.0
"""The processor files of a Qwen omni checkpoint."""

import json
from pathlib import Path
from typing import Any

MIN_PIXELS = 56 * 56
MAX_PIXELS = 224 * 224
AUDIO_SECONDS = 30
SAMPLE_RATE = 16_000
HOP_LENGTH = 160


def write_processor(
    out: Path, processor_class: str, patch_size: int, mean: list[float], std: list[float]
) -> None:
    """Write ``preprocessor_config.json``: image, video and audio settings in the hub's one file.

    Pictures have at most ``MAX_PIXELS`` (the real limit, 12.8 M, only makes start-up profiling
    slow). Sounds are 16 kHz mono; ``AUDIO_SECONDS`` is the window of one feature extraction.
    """
    samples = AUDIO_SECONDS * SAMPLE_RATE
    config: dict[str, Any] = {
        "chunk_length": AUDIO_SECONDS,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": HOP_LENGTH,
        "image_mean": mean,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": std,
        "max_pixels": MAX_PIXELS,
        "merge_size": 2,
        "min_pixels": MIN_PIXELS,
        "n_fft": 400,
        "n_samples": samples,
        "nb_max_frames": samples // HOP_LENGTH,
        "padding_side": "right",
        "padding_value": 0.0,
        "patch_size": patch_size,
        "processor_class": processor_class,
        "return_attention_mask": True,
        "sampling_rate": SAMPLE_RATE,
        "temporal_patch_size": 2,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")
