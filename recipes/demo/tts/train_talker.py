# SPDX-License-Identifier: Apache-2.0
"""Training the talker."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader

from recipes.demo.tts.corpus import Corpus
from recipes.demo.tts.layout import HOP
from recipes.demo.tts.prompts import Batches, Spoken
from recipes.demo.tts.talker import Batch, Talker
from recipes.demo.tts.train_codec import TrainedCodec

_RATE = 2e-3
_WARM_UP = 200
_DECAY = 0.03
_EPOCHS = 400
_ENCODED = 500.0
"""Seconds of sound that are encoded at once."""


@dataclass(frozen=True, slots=True)
class TalkerTraining:
    """How to.

    Attributes:
        seconds: On the clock.
        tokens: Positions of a batch.
        workers: Processes that make batches.
        save_every: Seconds.
    """

    seconds: float
    tokens: int
    workers: int
    save_every: float


@torch.no_grad()
def encoded(corpus: Corpus, codec: TrainedCodec, device: torch.device) -> list[Spoken]:
    """The whole corpus in codes; each sentence is encoded by itself, as part of a padded batch."""
    spoken = []
    for index in range(len(corpus)):
        shard = corpus.shard(index)
        samples = torch.from_numpy(shard.samples).to(device)
        starts = torch.tensor([0, *shard.frames]).cumsum(0).tolist()
        sounds = [samples[a * HOP : b * HOP] for a, b in pairwise(starts)]
        order = sorted(range(len(sounds)), key=lambda i: len(sounds[i]))
        made: dict[int, torch.Tensor] = {}
        while order:
            size = max(1, int(_ENCODED * 24_000 / len(sounds[order[-1]])))
            chosen, order = order[-size:], order[:-size]
            padded = nn.utils.rnn.pad_sequence([sounds[i] for i in chosen], batch_first=True)
            codes = codec.codes(padded.float() / 32767)
            made |= dict(zip(chosen, codes.to(torch.int16).cpu(), strict=True))
        spoken += [
            Spoken(text, voice, made[i][: shard.frames[i]].numpy())
            for i, (text, voice) in enumerate(zip(shard.texts, shard.voices, strict=True))
        ]
    return spoken


def train_talker(
    spoken: list[Spoken],
    how: TalkerTraining,
    device: torch.device,
    save: Callable[[Talker], None],
) -> Talker:
    """Train a talker; how good it is on the last sentences, which are not learnt, is printed."""
    torch.manual_seed(0)
    talker = Talker().to(device)
    kept_out = max(1, len(spoken) // 200)
    unseen = Batches(spoken[-kept_out:], how.tokens, 1, seed=1)
    batches = Batches(spoken[:-kept_out], how.tokens, _EPOCHS, seed=0)
    loader = DataLoader(
        batches, batch_size=None, num_workers=how.workers, pin_memory=device.type == "cuda"
    )
    matrices = [p for p in talker.parameters() if p.dim() > 1]
    vectors = [p for p in talker.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, _RATE, betas=(0.9, 0.98), fused=device.type == "cuda")
    began, told, saved = time.monotonic(), 0.0, time.monotonic()
    for step, batch in enumerate(loader):
        share = (time.monotonic() - began) / how.seconds
        if share >= 1:
            break
        rate = min(1, (step + 1) / _WARM_UP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * rate
        first, others = _losses(talker, batch, device)
        optimizer.zero_grad()
        (first + others).backward()
        nn.utils.clip_grad_norm_(talker.parameters(), 1.0)
        optimizer.step()
        if share - told > 0.05 or step == 0:
            told = share
            with torch.no_grad():
                new = _losses(talker, unseen[0], device)
            losses = " ".join(f"{each.item():.3f}" for each in (first, others, *new))
            print(f"talker {share:.2f} step {step} losses {losses}", flush=True)
        if time.monotonic() - saved > how.save_every:
            saved = time.monotonic()
            save(talker)
    save(talker)
    return talker.eval()


def _losses(
    talker: Talker, batch: Batch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    there = Batch(
        *(t.to(device, non_blocking=True) for t in (batch.text, batch.codes, batch.wanted))
    )
    with torch.autocast(device.type, torch.bfloat16):
        return talker.losses(there)
