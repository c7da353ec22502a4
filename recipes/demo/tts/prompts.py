# SPDX-License-Identifier: Apache-2.0
"""Prompts as the server makes them (`vllm_omni/pipelines/qwen3_tts.py`), and batches of them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from recipes.demo.tts.layout import (
    CODEBOOK,
    GROUPS,
    LANGUAGE,
    ROLE,
    TALKER,
    token_ids,
)
from recipes.demo.tts.talker import Batch
from vllm_omni.testing.tiny.tokenizer import IM_START

_LANGUAGE_SHARE = 0.2
"""Of the prompts, in which the language is named."""
_MOST_WRONG = 0.12
"""Greatest share of the codes of a batch that are fed wrong, so that mistakes are got over."""


def prompt(text: str, voice: str, named: bool = False) -> tuple[list[int], list[list[int]]]:
    """Text tokens and rows of codes.

    Args:
        text: What to say.
        voice: Who says it.
        named: Whether the language is said.
    """
    ids = token_ids()
    tokens = [ids[IM_START], ids[ROLE], ord("\n")]
    first = [-1] * len(tokens)
    pad = ids["<tts_pad>"]
    begin, end = TALKER["codec_think_bos_id"], TALKER["codec_think_eos_id"]
    if named:
        codes = [TALKER["codec_think_id"], begin, TALKER["codec_language_id"][LANGUAGE], end]
    else:
        codes = [TALKER["codec_nothink_id"], begin, end]
    codes.append(TALKER["spk_id"][voice])
    tokens += [pad] * len(codes) + [ids["<tts_text_bos>"]]
    first += [*codes, TALKER["codec_pad_id"]]
    spoken = [*text.encode(), ids["<tts_text_eod>"]]
    tokens += [*spoken, pad]
    first += [TALKER["codec_pad_id"]] * len(spoken) + [TALKER["codec_bos_id"]]
    return tokens, [[code] + [-1] * (GROUPS - 1) for code in first]


@dataclass(frozen=True, slots=True)
class Spoken:
    """A sentence and how it sounds.

    Attributes:
        text: What is said.
        voice: Name of who says it.
        codes: int16 [frames, groups].
    """

    text: str
    voice: str
    codes: np.ndarray


class Batches(Dataset[Batch]):
    """Batches of sentences of about one length, on the CPU.

    Args:
        spoken: All sentences.
        tokens: Positions of a batch.
        epochs: How often each sentence comes.
        seed: Of order and mistakes.
    """

    def __init__(self, spoken: list[Spoken], tokens: int, epochs: int, seed: int) -> None:
        self._spoken, self._seed = spoken, seed
        rng = np.random.default_rng(seed)
        lengths = np.array([len(each.text.encode()) + len(each.codes) for each in spoken])
        self._groups: list[np.ndarray] = []
        for _ in range(epochs):
            order = np.argsort(lengths * rng.uniform(0.9, 1.1, len(lengths)))
            groups, start = [], 0
            while start < len(order):
                size = max(1, tokens // int(lengths[order[start]] * 1.1 + 16))
                groups.append(order[start : start + size])
                start += size
            self._groups += [groups[index] for index in rng.permutation(len(groups))]

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Batch:
        rng = np.random.default_rng([self._seed, index])
        return self._batch([self._spoken[each] for each in self._groups[index]], rng)

    def _batch(self, spoken: list[Spoken], rng: np.random.Generator) -> Batch:
        """These, with some codes fed wrong."""
        named = rng.random(len(spoken)) < _LANGUAGE_SHARE
        prompts = [prompt(s.text, s.voice, bool(n)) for s, n in zip(spoken, named, strict=True)]
        longest = max(len(p[0]) + len(s.codes) for p, s in zip(prompts, spoken, strict=True))
        shape = (len(spoken), longest)
        text = np.full(shape, -1, np.int64)
        codes = np.full((*shape, GROUPS), -1, np.int64)
        wanted = codes.copy()
        pad, end = token_ids()["<tts_pad>"], TALKER["codec_eos_token_id"]
        for row, ((tokens, rows), each) in enumerate(zip(prompts, spoken, strict=True)):
            begin, frames = len(tokens), len(each.codes)
            text[row, :begin], text[row, begin : begin + frames] = tokens, pad
            codes[row, :begin], codes[row, begin : begin + frames] = rows, each.codes
            wanted[row, begin - 1 : begin - 1 + frames] = each.codes
            wanted[row, begin - 1 + frames, 0] = end
        fed = _with_mistakes(codes, rng)
        return Batch(*(torch.from_numpy(each) for each in (text, fed, wanted)))


def _with_mistakes(codes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    share = rng.random() * _MOST_WRONG
    wrong = (rng.random(codes.shape) < share) & (codes[..., -1:] >= 0)
    return np.where(wrong, rng.integers(CODEBOOK, size=codes.shape), codes)
