# SPDX-License-Identifier: Apache-2.0
"""Sounds of text-to-speech requests to a deployment."""

import asyncio
from typing import Any

import numpy as np

from tests.parity.harness import Deployment
from vllm_omni.speech.request import SpeechRequest

TOLERANCE = 1e-4
"""Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently."""


def say(
    running: Deployment, *requests: SpeechRequest | str, max_tokens: int, **params: Any
) -> list[np.ndarray]:
    """The joined streams of requests that run at the same time, greedily unless told else."""

    async def one(request: SpeechRequest | str) -> np.ndarray:
        stages = [{"temperature": 0, "max_tokens": max_tokens, **params}, None]
        outputs = running.omni.generate(request, sampling_params_list=stages)
        pieces = [o.audio.samples async for o in outputs if o.audio is not None]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.float32)

    async def together() -> list[np.ndarray]:
        return await asyncio.gather(*map(one, requests))

    return running.run(together())


def assert_same(made: np.ndarray, wanted: np.ndarray) -> None:
    assert made.shape == wanted.shape, (made.shape, wanted.shape)
    np.testing.assert_allclose(made, wanted, rtol=0, atol=TOLERANCE)


def assert_differ(one: np.ndarray, other: np.ndarray) -> None:
    """They are two sounds, not one with another end."""
    length = min(len(one), len(other))
    assert length > 0 and not np.allclose(one[:length], other[:length], atol=0.01)
