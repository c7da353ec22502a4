# SPDX-License-Identifier: Apache-2.0
"""Sounds of text-to-speech requests to a deployment."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.parity.harness import Deployment
from vllm_omni.speech.request import SpeechRequest

TOLERANCE = 1e-4
"""Samples are in [-1, 1]. Windows are decoded apart and batched, which rounds differently; so are
steps, and of frames that are vectors what they round is fed back for tens of frames."""


@dataclass
class Speaker:
    """A deployment that is asked for sounds."""

    running: Deployment

    async def pieces(
        self, request: SpeechRequest | str, params: dict[str, Any]
    ) -> list[np.ndarray]:
        """A sound as it is streamed."""
        outputs = self.running.omni.generate(request, sampling_params_list=[params, None])
        return [output.audio.samples async for output in outputs if output.audio is not None]

    def say(self, *asked: tuple[SpeechRequest | str, dict[str, Any]]) -> list[np.ndarray]:
        """The joined streams of requests that run at the same time."""

        async def together() -> list[list[np.ndarray]]:
            return await asyncio.gather(*(self.pieces(*each) for each in asked))

        nothing = np.zeros(0, np.float32)
        return [np.concatenate([nothing, *pieces]) for pieces in self.running.run(together())]


def say(
    running: Deployment, *requests: SpeechRequest | str, max_tokens: int, **params: Any
) -> list[np.ndarray]:
    """The joined streams of requests that run at the same time, greedily unless told else."""
    stages = {"temperature": 0, "max_tokens": max_tokens, **params}
    return Speaker(running).say(*((request, stages) for request in requests))


def assert_same(made: np.ndarray, wanted: np.ndarray) -> None:
    assert made.shape == wanted.shape, (made.shape, wanted.shape)
    np.testing.assert_allclose(made, wanted, rtol=0, atol=TOLERANCE)


def assert_differ(one: np.ndarray, other: np.ndarray) -> None:
    """They are two sounds, not one with another end."""
    length = min(len(one), len(other))
    assert length > 0 and not np.allclose(one[:length], other[:length], atol=0.01)
