# SPDX-License-Identifier: Apache-2.0
"""The sounds of a prompt that was written in Python, made fit for the models."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_omni.media.hearing import as_heard

PARAM = "multi_modal_data.audio"


def has_sounds(prompt: Any) -> bool:
    """Whether the prompt brings sounds as samples."""
    return isinstance(prompt, Mapping) and "audio" in (prompt.get("multi_modal_data") or {})


def with_sounds_as_heard(prompt: Any) -> Any:
    """The prompt with each of its sounds clean, mono and at the models' rate.

    Raises:
        OmniClientError: A sound is none.
    """
    if not has_sounds(prompt):
        return prompt
    data = prompt["multi_modal_data"]
    return {**prompt, "multi_modal_data": {**data, "audio": _sounds(data["audio"])}}


def _sounds(given: Any) -> Any:
    """vLLM takes one sound or several; two-dimensional arrays are several."""
    match given:
        case list() if given and all(isinstance(each, int | float) for each in given):
            return _sound(np.asarray(given, dtype=np.float64))
        case list():
            return [_sound(each) for each in given]
        case np.ndarray() | torch.Tensor() if given.ndim == 2:
            return [_sound(each) for each in given]
    return _sound(given)


def _sound(given: Any) -> Any:
    """One sound. What is none (embeddings, the place of a cached sound) is left to vLLM."""
    match given:
        case tuple():
            samples, rate = given
            return as_heard(_array(samples), rate, param=PARAM)
        case np.ndarray():
            return as_heard(given, param=PARAM)
        case torch.Tensor() if given.ndim == 1:
            return as_heard(_array(given), param=PARAM)
        case list():
            return as_heard(_array(given), param=PARAM)
    return given


def _array(samples: Any) -> np.ndarray:
    if isinstance(samples, torch.Tensor):
        return samples.detach().float().cpu().numpy()
    return np.asarray(samples)
