# SPDX-License-Identifier: Apache-2.0
"""MOSS-TTS (its delay model) as a vLLM model class: Qwen3 over rows of text and codes.

Reference: `modeling_moss_tts.py` of the published checkpoints. vLLM samples the first group's code;
the text token of a row, which says what the row is, is drawn inside of the step like the other
codes (`models/slots.py`), from all of the vocabulary.

The sound of an answer is its first one: `audio_end_token_id` ends the stage. (The reference writes
on, which nobody hears.)
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import WeightsMapper

from vllm_omni.models.groups import draw_groups
from vllm_omni.models.interfaces import Frames, FrameSampling, OmniCapabilities
from vllm_omni.models.qwen3_rows import Qwen3Rows
from vllm_omni.models.slots import SlotPattern, SlotTokens

TEXT_TEMPERATURE = 1.5
TEXT_TOP_K = 50
"""How text tokens are drawn, as the reference's `generate` has it; all of them are likely enough
(`top_p` is 1)."""
_TEXT_STREAM = 2
_PER_GROUP = re.compile(r"(emb_ext|lm_heads)\.(\d+)\.weight")


class MossTTSTalker(Qwen3Rows, SupportsQuant):
    """The codec language model. Its vLLM config is the checkpoint's `language_config`, see
    `hf_overrides`."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"language_model.": "model.", "lm_heads.0.": "text_head."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.groups = config.num_codebooks
        self.make_parts(vllm_config, prefix)
        self.text_head = nn.Linear(config.hidden_size, config.text_vocab_size, bias=False)
        tokens = SlotTokens(**config.slot_tokens)
        self.pattern = SlotPattern(
            self.groups, config.text_vocab_size, tokens, config.audio_pad_code
        )
        self.omni_capabilities = OmniCapabilities(
            row_driven=True, emits=("codes",), frame_memory=SlotPattern.MEMORY
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the first group, [n, codebook_size + 1]; neither padding, nor the id of the stream's
        end, which only `frames` says."""
        first = self.code_heads.weight[: self.config.codebook_size]
        logits = functional.linear(hidden_states, first)
        logits[:, self.pattern.pad] = float("-inf")
        return functional.pad(logits, (0, 1), value=float("-inf"))

    def frames(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, sampling: FrameSampling
    ) -> Frames:
        """See `RowDriven`; the sampled code is replaced where there is none in its turn."""
        logits = self.code_heads(hidden).float().view(len(hidden), self.groups, -1)
        logits[:, :, self.pattern.pad] = float("-inf")
        others = draw_groups(logits[:, 1:], sampling)
        text_logits = self.text_head(hidden).float()
        text_logits.masked_fill_(~self.pattern.allowed(sampling.memory), float("-inf"))
        text = draw_groups(text_logits[:, None], _of_text(sampling), _TEXT_STREAM)[:, 0]
        drawn = torch.cat([token_ids[:, None], others], dim=1)
        step = self.pattern.step(text, drawn, sampling.memory)
        return Frames(
            codes=step.codes,
            inputs=self.embed_text(step.text) + self.code_tables.summed(step.codes),
            tokens=torch.where(step.ended, self.config.codebook_size, step.codes[:, 0]),
            memory=step.memory,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what belongs to this stage; tables and heads of codes are of one group each."""
        loaded: set[str] = set()

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                part = self._part(name)
                if part is None:
                    yield name, tensor
                else:
                    target, group = part
                    start = group * self.config.codebook_size
                    parameter = self.get_parameter(target)
                    parameter.data[start : start + len(tensor)].copy_(tensor)
                    loaded.add(target)

        return super().load_weights(others()) | loaded

    @staticmethod
    def _part(name: str) -> tuple[str, int] | None:
        """The parameter that a group's tensor is a part of, and the group."""
        found = _PER_GROUP.fullmatch(name)
        if found is None:
            return None
        index = int(found[2])
        if found[1] == "emb_ext":
            return "code_tables.weight", index
        return ("code_heads.weight", index - 1) if index else None


def _of_text(sampling: FrameSampling) -> FrameSampling:
    """How the text tokens of the same requests are drawn."""
    temperature = sampling.temperature
    return replace(
        sampling,
        temperature=torch.where(temperature > 0, TEXT_TEMPERATURE, temperature),
        top_k=torch.full_like(sampling.top_k, TEXT_TOP_K),
        top_p=torch.ones_like(sampling.top_p),
    )
