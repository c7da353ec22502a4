# SPDX-License-Identifier: Apache-2.0
"""Language models that read prompts; causal, so padding at the end changes nothing before it."""

from collections.abc import Mapping

from vllm_omni.diffusion.programs.diffusers.rules.common import INLINE
from vllm_omni.diffusion.rules import Along, Batching, CallRules, Ragged, RaggedOutput, Rule


def _same(length: int) -> int:
    return length


ARGUMENTS: Mapping[str, Rule] = {
    "input_ids": Ragged(),
    "attention_mask": Ragged(),
    "pixel_values": Batching.PACKED,
    "image_grid_thw": Batching.PACKED,
    "position_ids": Along(dim=1),  # [axes, rows, tokens]
}

READER = CallRules(
    ARGUMENTS,
    RaggedOutput(_same, dim=1),
    dropped_outputs=frozenset({"past_key_values", "rope_deltas"}),
)

RULES = {
    name: {"forward": READER, "generate": INLINE}
    for name in (
        "Mistral3ForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3VLForConditionalGeneration",
    )
} | {
    name: {"forward": READER}
    for name in ("GlmModel", "Mistral3Model", "Qwen3Model", "Qwen3VLModel")
}
