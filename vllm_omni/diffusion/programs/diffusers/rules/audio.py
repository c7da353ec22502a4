# SPDX-License-Identifier: Apache-2.0
"""Denoisers of sounds and what prepares their conditions."""

from vllm_omni.diffusion.rules import Batching, CallRules, Ragged

PLAIN = {"forward": CallRules()}
"""Every tensor has the batch in front."""
ALONE = {"forward": CallRules(max_batch=1)}

RULES = {
    # One timestep for both halves of guidance, and a table of positions.
    "StableAudioDiTModel": {
        "forward": CallRules({"timestep": Batching.STACK, "rotary_embedding": Batching.SHARED})
    },
    "StableAudioProjectionModel": PLAIN,
    "StableAudio3DiTModel": PLAIN,
    "StableAudio3DurationEmbedder": PLAIN,
    # Text, lyrics and voice are one sequence without a mask: only equal lengths go together.
    "AceStepTransformer1DModel": PLAIN,
    # Counts which sound belongs to which row of the batch.
    "AceStepConditionEncoder": ALONE,
    # Convolutions over the text let padding leak into it: only equal lengths go together.
    "LongCatAudioDiTTransformer": PLAIN,
    "AudioLDM2UNet2DConditionModel": {
        "forward": CallRules(
            {
                "timestep": Batching.STACK,
                "encoder_hidden_states_1": Ragged(dim=1),
                "encoder_attention_mask_1": Ragged(dim=1),
            }
        )
    },
    "AudioLDM2ProjectionModel": PLAIN,
}
