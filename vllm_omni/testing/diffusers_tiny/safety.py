# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Cosmos's guardrail, whose own weights are large and cannot be left out."""

import numpy as np
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn


class LenientSafetyChecker(ModelMixin, ConfigMixin):
    """Finds a text with `forbidden` in it unsafe, and every video safe.

    Its one weight is there because diffusers loads no component without weights.
    """

    @register_to_config
    def __init__(self, forbidden: str = "<unsafe>") -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(1))

    def check_text_safety(self, prompt: str) -> bool:
        return self.config.forbidden not in prompt

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray:
        return frames
