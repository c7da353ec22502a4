# SPDX-License-Identifier: Apache-2.0
"""transformers' own Dia, asked one request at a time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DacModel,
    DiaFeatureExtractor,
    DiaForConditionalGeneration,
    DiaProcessor,
    DiaTokenizer,
)

RATE = 44_100
LONGEST_DELAY = 15
END = 1024


@dataclass(frozen=True)
class Answer:
    """What the reference made.

    Attributes:
        frames: Frames of the sound.
        sound: float32 [samples].
        ended: It said so, rather than being cut off.
        margin: Least distance of a greedy choice from the next best one.
    """

    frames: int
    sound: np.ndarray
    ended: bool
    margin: float


class HFDia:
    """A checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        codec = DacModel.from_pretrained(model / "audio_tokenizer").eval()
        self.processor = DiaProcessor(
            DiaFeatureExtractor.from_pretrained(model), DiaTokenizer.from_pretrained(model), codec
        )
        self.model = DiaForConditionalGeneration.from_pretrained(model).eval()

    @torch.inference_mode()
    def say(
        self, text: str, recording: np.ndarray | None, max_rows: int, guidance: float = 3.0
    ) -> Answer:
        """Greedy speech, with the codes that guidance leaves."""
        inputs = self.processor(text=[text], audio=recording, sampling_rate=RATE)
        heard = self.processor.get_audio_prompt_len(inputs["decoder_attention_mask"])
        made = self.model.generate(
            **inputs,
            do_sample=False,
            guidance_scale=guidance,
            max_new_tokens=max_rows,
            output_scores=True,
            return_dict_in_generate=True,
        )
        said = made.sequences[0, heard:, 0]
        frames = int((said == END).nonzero()[0, 0])
        best = torch.stack([scores.topk(2).values for scores in made.scores])
        free = best[best[..., 1].isfinite()]
        sound = np.zeros(0, np.float32)
        if frames:  # DAC decodes no nothing
            sound = self.processor.decode(made.sequences, audio_prompt_len=heard).numpy()
        # The reference ends the first group in time for the others to end within the limit.
        ended = frames < max_rows - LONGEST_DELAY - 1
        return Answer(frames, sound, ended, float((free[:, 0] - free[:, 1]).min()))
