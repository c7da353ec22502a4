# SPDX-License-Identifier: Apache-2.0
"""How much of speech an offline recogniser (pocketsphinx) gets wrong."""

import re
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from pocketsphinx import Decoder
from scipy.signal import resample_poly

SAMPLE_RATE = 24_000
_UP, _DOWN = 2, 3
_QUIET = 0.2
"""Seconds of silence before and after."""
_LEVEL = 0.05
"""Root mean square that all sound is brought to."""
_NOISE = 1e-3
"""Standard deviation of the noise that is added: the recogniser takes digital silence badly."""

_decoder: Decoder | None = None


def words(text: str) -> list[str]:
    """Of a text, as the recogniser writes them."""
    return re.sub(r"[^a-z' ]", "", text.lower().replace("\u2019", "'")).split()


def heard(sound: np.ndarray) -> str:
    """What the recogniser hears in float [samples] at 24 kHz."""
    global _decoder
    if _decoder is None:
        _decoder = Decoder(samprate=16_000, loglevel="FATAL")
    level = max(float(np.sqrt(np.mean(np.square(sound)))), 1e-6)
    narrow = resample_poly(sound * (_LEVEL / level), _UP, _DOWN)
    padded = np.pad(narrow, int(_QUIET * 16_000))
    noisy = padded + np.random.default_rng(0).normal(0, _NOISE, len(padded))
    samples = (np.clip(noisy, -1, 1) * 32767).astype(np.int16)
    _decoder.start_utt()
    _decoder.process_raw(samples.tobytes(), full_utt=True)
    _decoder.end_utt()
    found = _decoder.hyp()
    return found.hypstr if found else ""


def distance(said: list[str], heard_words: list[str]) -> int:
    """Fewest words to insert, delete and replace."""
    row = list(range(len(heard_words) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard_words, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def word_error_rate(
    texts: list[str], sounds: list[np.ndarray], processes: int
) -> tuple[float, list[str]]:
    """Of all of them together, and what was heard of each."""
    with ProcessPoolExecutor(processes) as pool:
        hypotheses = list(pool.map(heard, sounds))
    pairs = [(words(t), h.split()) for t, h in zip(texts, hypotheses, strict=True)]
    wrong = sum(distance(said, found) for said, found in pairs)
    return wrong / sum(len(said) for said, _ in pairs), hypotheses
