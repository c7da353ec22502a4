# SPDX-License-Identifier: Apache-2.0
"""Speech for training: shards of sentences, each spoken by espeak-ng in a process of its own."""

import json
import multiprocessing as mp
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.demo.tts.layout import HOP
from recipes.demo.tts.sentences import Sentences, word_counts
from recipes.demo.tts.speak import Speaker
from recipes.demo.tts.voices import VOICES

SHARD = 250
"""Sentences."""
_DITHER = 2e-4
"""Standard deviation of the noise that is added: espeak-ng's pauses are digital silence."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of them, in memory.

    Attributes:
        texts: What is said.
        voices: By whom.
        samples: int16 [frames * hop], one sentence after the other.
        frames: Of each sentence.
    """

    texts: list[str]
    voices: list[str]
    samples: np.ndarray
    frames: list[int]


class Corpus:
    """A folder of shards, made in the background.

    Args:
        folder: Where to; what is there is taken for what would be made.
        shards: How many.
        seed: Of sentences and voices.
        processes: How many speak.
        words: See `word_counts`.
    """

    def __init__(
        self, folder: Path, shards: int, seed: int, processes: int, words: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        context = mp.get_context("spawn")
        self._pool = context.Pool(processes, _begin, (words,))
        jobs = [(folder, seed, index) for index in range(shards)]
        self._made = [self._pool.apply_async(_make, job) for job in jobs]
        self._pool.close()

    def __len__(self) -> int:
        return len(self._made)

    def shard(self, index: int) -> Shard:
        """Wait for one."""
        self._made[index].get()
        return read_shard(self._folder, index)


def read_shard(folder: Path, index: int) -> Shard:
    """One that is there."""
    about = json.loads(_about(folder, index).read_text())
    samples = np.load(_sound(folder, index))
    return Shard(about["texts"], about["voices"], samples, about["frames"])


_sentences: Sentences
_speaker: Speaker


def _begin(words: Path | None) -> None:
    global _sentences, _speaker
    _sentences = Sentences(word_counts(words))
    _speaker = Speaker()


def _make(folder: Path, seed: int, index: int) -> None:
    if _about(folder, index).exists():
        return
    rng = np.random.default_rng([seed, index])
    texts, voices, sounds, frames = [], [], [], []
    shares = np.array([voice.share for voice in VOICES])
    while len(texts) < SHARD:
        text = _sentences.draw(rng)
        voice = VOICES[rng.choice(len(VOICES), p=shares)]
        sound = whole_frames(_speaker.say(text, voice))
        noisy = sound + rng.normal(0, _DITHER, len(sound))
        texts.append(text)
        voices.append(voice.name)
        sounds.append(np.clip(noisy * 32767, -32767, 32767).astype(np.int16))
        frames.append(len(sound) // HOP)
    np.save(_sound(folder, index), np.concatenate(sounds))
    about = {"texts": texts, "voices": voices, "frames": frames}
    _about(folder, index).write_text(json.dumps(about))


def whole_frames(sound: np.ndarray) -> np.ndarray:
    """[samples] -> [frames * hop], with silence behind."""
    return np.pad(sound, (0, -len(sound) % HOP))


def _about(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.json"


def _sound(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.npy"
