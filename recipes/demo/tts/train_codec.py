# SPDX-License-Identifier: Apache-2.0
"""Training the codec."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from recipes.demo.tts.codec import (
    Encoder,
    Judges,
    SpectralLoss,
    SplitQuantizer,
    alike,
    fooled,
    judged_real,
)
from recipes.demo.tts.corpus import Corpus
from recipes.demo.tts.layout import CODEBOOK, CODEC, GROUPS, HOP
from vllm_omni.config.hf.qwen3_tts_codec import Qwen3TTSCodecConfig
from vllm_omni.models.qwen3_tts_codec import CodecDecoder

_SPECTRA_PER_FRAME = HOP // 240
_RATE, _JUDGE_RATE = 8e-4, 4e-4
_WARM_UP = 100
_JUDGED_FROM = 0.3
"""Share of the time after which there are discriminators."""
_MEL, _COMMIT, _FOOL, _ALIKE = 15.0, 1.0, 1.0, 2.0
_WHOLE_SHARE = 0.6
"""Of the clips, that use all groups."""


class TrainedCodec(nn.Module):
    """Sound to codes to sound."""

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3TTSCodecConfig(**CODEC).decoder_config
        self.encoder = Encoder(config.codebook_dim, _SPECTRA_PER_FRAME)
        self.quantizer = SplitQuantizer(config.codebook_dim, GROUPS, CODEBOOK)
        self.decoder = CodecDecoder(config)
        for blocks in self.decoder.upsample:
            nn.init.constant_(blocks[1].gamma, 0.1)

    def decoded(self, vectors: torch.Tensor) -> torch.Tensor:
        """[batch, frames, width] -> [batch, samples]; see `CodecDecoder`, which begins at codes."""
        hidden = self.decoder.pre_conv(vectors.transpose(1, 2))
        latents = self.decoder.pre_transformer.transform(hidden.transpose(1, 2))
        return self.unclipped(latents)

    def unclipped(self, latents: torch.Tensor) -> torch.Tensor:
        """`CodecDecoder.samples`, but not clipped, so that there is a gradient."""
        hidden = latents.transpose(1, 2)
        for blocks in self.decoder.upsample:
            for block in blocks:
                hidden = block(hidden)
        for block in self.decoder.decoder:
            hidden = block(hidden)
        return hidden.squeeze(1)

    @torch.no_grad()
    def codes(self, samples: torch.Tensor) -> torch.Tensor:
        """[batch, samples] of whole frames -> int64 [batch, frames, groups]."""
        return self.quantizer(self.encoder(samples))[1]

    def weights(self) -> dict[str, torch.Tensor]:
        """`speech_tokenizer/model.safetensors`, its `decoder.*`."""
        self.settle()
        return {f"decoder.{name}": each for name, each in self.decoder.state_dict().items()}

    @torch.no_grad()
    def settle(self) -> None:
        """Give the decoder its quantizer."""
        codebooks = iter(self.quantizer.codebooks)
        for name, both in self.quantizer.projections.items():
            part = self.decoder.quantizer.get_submodule(name)
            part.input_proj.weight.copy_(both["in"].weight[..., None])
            part.output_proj.weight.copy_(both["out"].weight[..., None])
            for layer in part.vq.layers:
                layer._codebook.cluster_usage.fill_(1)
                layer._codebook.embedding_sum.copy_(next(codebooks).entries())


@dataclass(frozen=True, slots=True)
class CodecTraining:
    """How to.

    Attributes:
        seconds: On the clock.
        batch: Clips.
        frames: Of a clip.
        shards: Of the corpus, that are heard.
    """

    seconds: float
    batch: int
    frames: int
    shards: int


def train_codec(corpus: Corpus, how: CodecTraining, device: torch.device) -> TrainedCodec:
    """Train a codec; how good it is is printed."""
    torch.manual_seed(0)
    codec, judges, spectral = (
        TrainedCodec().to(device),
        Judges().to(device),
        SpectralLoss().to(device),
    )
    trained = [p for n, p in codec.named_parameters() if not n.startswith("decoder.quantizer.")]
    ours = torch.optim.AdamW(trained, _RATE, betas=(0.8, 0.98), weight_decay=1e-3)
    theirs = torch.optim.AdamW(judges.parameters(), _JUDGE_RATE, betas=(0.8, 0.98))
    clips, began, told = _clips(corpus, how, device), time.monotonic(), 0.0
    step = 0
    while (share := (time.monotonic() - began) / how.seconds) < 1:
        rate = min(1, (step + 1) / _WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        _set_rate(ours, _RATE * rate)
        _set_rate(theirs, _JUDGE_RATE * rate)
        real = next(clips)
        kept = torch.randint(1, GROUPS, (len(real),), device=device)
        kept = torch.where(torch.rand(len(real), device=device) < _WHOLE_SHARE, GROUPS, kept)
        vectors, _, commitment = codec.quantizer(codec.encoder(real), kept)
        made = codec.decoded(vectors)
        mel = spectral(made, real)
        loss = _MEL * mel + _COMMIT * commitment
        if share > _JUDGED_FROM:
            _judge(judges, theirs, made.detach(), real)
            verdict = judges(made)
            with torch.no_grad():
                truth = judges(real)
            loss = loss + _FOOL * fooled(verdict) + _ALIKE * alike(verdict, truth)
        ours.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 2.0)
        ours.step()
        step += 1
        if share - told > 0.05 or step == 1:
            told = share
            print(
                f"codec {share:.2f} step {step} mel {mel:.3f} commit {commitment:.3f}", flush=True
            )
    return codec.eval()


def _judge(
    judges: Judges, optimizer: torch.optim.Optimizer, made: torch.Tensor, real: torch.Tensor
) -> None:
    loss = judged_real(judges(made), judges(real))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _clips(corpus: Corpus, how: CodecTraining, device: torch.device) -> Iterator[torch.Tensor]:
    """Batches of clips, float32 [batch, samples]; more and more shards are heard."""
    heard: list[torch.Tensor] = []
    lengths: list[int] = []
    size = how.frames * HOP
    while True:
        if len(heard) < min(how.shards, len(corpus)):
            shard = torch.from_numpy(corpus.shard(len(heard)).samples).to(device)
            heard.append(shard)
            lengths.append(len(shard))
        chosen = np.random.randint(len(heard), size=how.batch)
        starts = [np.random.randint(0, (lengths[c] - size) // HOP) * HOP for c in chosen]
        pieces = [heard[c][s : s + size] for c, s in zip(chosen, starts, strict=True)]
        yield torch.stack(pieces).float() / 32767


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
