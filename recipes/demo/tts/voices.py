# SPDX-License-Identifier: Apache-2.0
"""The voices that demo-tts is taught: espeak-ng's, each at one pitch and speed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Voice:
    """One of them.

    Attributes:
        name: As the server knows it.
        code: Its id among the talker's codes, less the size of the codebook.
        espeak: espeak-ng's name of voice and variant.
        speed: Words per minute.
        pitch: 0 to 99.
        gain: On espeak-ng's samples.
        share: Of the sentences that are spoken for training.
    """

    name: str
    code: int
    espeak: str
    speed: int
    pitch: int
    gain: float
    share: float


VOICES = (
    Voice("fern", 900, "en-us+f2", 150, 50, 0.8, 0.4),
    Voice("wren", 901, "en-us+f5", 165, 55, 0.8, 0.2),
    Voice("moss", 902, "en-us", 160, 45, 0.8, 0.2),
    Voice("oak", 903, "en-us+m3", 135, 35, 0.8, 0.2),
)
