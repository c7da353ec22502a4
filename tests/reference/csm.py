# SPDX-License-Identifier: Apache-2.0
"""transformers' own CSM, asked one request at a time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CsmForConditionalGeneration, CsmProcessor

from vllm_omni.testing.media import sound

RATE = 24_000


@dataclass(frozen=True)
class Turn:
    """What was said before.

    Attributes:
        speaker: Number of who spoke.
        text: What.
        seconds: Length of the recording.
        seed: Which recording it is.
    """

    speaker: str
    text: str
    seconds: float
    seed: int

    @property
    def samples(self) -> np.ndarray:
        return sound(self.seconds, RATE, self.seed)


@dataclass(frozen=True)
class Answer:
    """What the reference made.

    Attributes:
        frames: int64 [frames, groups], the end included.
        sound: float32 [samples].
        margin: Least distance of a greedy choice from the next best one.
    """

    frames: torch.Tensor
    sound: np.ndarray
    margin: float


class HFCsm:
    """A checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        self.processor = CsmProcessor.from_pretrained(model)
        self.model = CsmForConditionalGeneration.from_pretrained(model).eval()

    def say(self, speaker: str, text: str, turns: tuple[Turn, ...], max_frames: int) -> Answer:
        """Greedy speech, with the sound that `output_audio` gives."""
        conversation = [
            _message(turn.speaker, turn.text, {"type": "audio", "path": turn.samples})
            for turn in turns
        ]
        conversation.append(_message(speaker, text))
        inputs = self.processor.apply_chat_template(conversation, tokenize=True, return_dict=True)
        margins: list[float] = []

        def watch(_module: Any, _args: Any, logits: torch.Tensor) -> None:
            best, next_best = logits.reshape(-1, logits.shape[-1])[-1].topk(2).values.tolist()
            margins.append(best - next_best)

        heads = (self.model.lm_head, self.model.depth_decoder.codebooks_head)
        hooks = [head.register_forward_hook(watch) for head in heads]
        with torch.inference_mode():
            made = self.model.generate(
                **inputs,
                do_sample=False,
                depth_decoder_do_sample=False,
                max_new_tokens=max_frames,
                output_audio=True,
                return_dict_in_generate=True,
            )
        for hook in hooks:
            hook.remove()
        return Answer(made.sequences[0], made.audio[0].numpy(), min(margins))


def _message(speaker: str, text: str, *more: dict[str, Any]) -> dict[str, Any]:
    return {"role": speaker, "content": [{"type": "text", "text": text}, *more]}
