# SPDX-License-Identifier: Apache-2.0
"""transformers' own VibeVoice, asked one request at a time, with noise of a request's seed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    VibeVoiceForConditionalGeneration,
    VibeVoiceProcessor,
)

from vllm_omni.models.noise import Noise
from vllm_omni.testing.media import sound

RATE = 24_000
RECORDING_SEED = 0
"""Of the noise on recordings: ours is the same for all."""


@dataclass(frozen=True)
class Line:
    """What a speaker says, and a recording of the speaker.

    Attributes:
        speaker: Number of who speaks.
        text: What.
        seconds: Length of the recording; 0 for none.
        seed: Which recording it is.
    """

    speaker: str
    text: str
    seconds: float = 0.0
    seed: int = 0

    @property
    def samples(self) -> np.ndarray:
        return sound(self.seconds, RATE, self.seed)


@dataclass(frozen=True)
class Answer:
    """What the reference made.

    Attributes:
        tokens: What was sampled.
        sound: float32 [samples].
        margin: Least distance of a greedy choice from the next best one.
    """

    tokens: list[int]
    sound: np.ndarray
    margin: float


class _Seeded(VibeVoiceForConditionalGeneration):
    """Draws the noise of a frame as a request with a seed does, for the position of its token.

    Tokens are chosen as in the authors' code: there, `guidance_scale` is for frames alone. With
    transformers it also makes `generate` guide the choice of tokens, by a third sequence in which
    frames are fed as the embedding of their token.
    """

    seed: int
    position: int

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        unwanted = UnbatchedClassifierFreeGuidanceLogitsProcessor
        return LogitsProcessorList([each for each in processors if not isinstance(each, unwanted)])

    def _reset_negative_cache_for_audio_start(self, *args: Any) -> None:
        # Called once per token.
        self.position += 1
        super()._reset_negative_cache_for_audio_start(*args)

    def _sample_audio_latent(self, *args: Any) -> torch.Tensor:
        noise = Noise(torch.tensor([self.seed]), torch.tensor([self.position]))
        drawn = noise.normal(self.config.audio_config.hidden_size)
        # It draws for both halves, and uses the first.
        with mock.patch("torch.randn", lambda *_: drawn.repeat(2, 1)):
            return super()._sample_audio_latent(*args)


class HFVibeVoice:
    """A checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        self.processor = VibeVoiceProcessor.from_pretrained(model)
        self.model = _Seeded.from_pretrained(model).eval()
        tower = self.model.model.audio_tower
        encode = tower.encode

        def encode_varied(samples: torch.Tensor, sample: bool) -> Any:
            """The reference's own, with noise that does not depend on what is encoded beside."""
            encoded = encode(samples, sample=False)
            generator = torch.Generator().manual_seed(RECORDING_SEED)
            strength = tower.config.vae_std * torch.randn(1, generator=generator)
            frames = encoded.latents.shape[1:]
            encoded.latents = encoded.latents + strength * torch.randn(frames, generator=generator)
            return encoded

        tower.encode = encode_varied

    def say(self, lines: tuple[Line, ...], seed: int, max_tokens: int) -> Answer:
        """Speech, whose noise is of this seed."""
        conversation = [
            {
                "role": line.speaker,
                "content": [
                    {"type": "text", "text": line.text},
                    *([{"type": "audio", "path": line.samples}] if line.seconds else []),
                ],
            }
            for line in lines
        ]
        inputs = self.processor.apply_chat_template(
            conversation, tokenize=True, return_dict=True, return_tensors="pt"
        )
        self.model.seed = seed
        self.model.position = inputs["input_ids"].shape[1] - 1
        with torch.inference_mode():
            made = self.model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                output_scores=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(made.scores).topk(2).values
        tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        nothing = torch.zeros(0)
        samples = nothing if made.audio[0] is None else made.audio[0].reshape(-1)
        return Answer(tokens, samples.numpy(), float((best[:, 0] - best[:, 1]).min()))
