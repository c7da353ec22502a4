# SPDX-License-Identifier: Apache-2.0
"""Denoisers of videos. Their prompts are padded to one length, or only equal lengths run together.

Where guidance takes two calls (Wan, Cosmos, Helios, SkyReels, HunyuanVideo 1.5), both run together
(see `vllm_omni.diffusion.foresight`), and with those of other requests.
"""

from vllm_omni.diffusion.rules import Batching, CallRules

PLAIN = {"forward": CallRules()}
"""Every tensor has the batch in front."""

RULES = {
    # Of first and last frame, the image encoder's tokens are two rows for one row of the batch.
    "WanTransformer3DModel": {
        "forward": CallRules(
            {
                "hidden_states": Batching.CAT,
                "encoder_hidden_states": Batching.CAT,
                "encoder_hidden_states_image": Batching.CAT,
            }
        )
    },
    # One scale for each layer.
    "WanVACETransformer3DModel": {
        "forward": CallRules({"control_hidden_states_scale": Batching.SHARED})
    },
    "WanAnimateTransformer3DModel": PLAIN,
    "SkyReelsV2Transformer3DModel": PLAIN,
    "HeliosTransformer3DModel": PLAIN,
    "LTXVideoTransformer3DModel": PLAIN,
    "LTX2VideoTransformer3DModel": PLAIN,
    "LTX2TextConnectors": PLAIN,
    "LTX2Vocoder": PLAIN,
    "LTX2VocoderWithBWE": PLAIN,
    "HunyuanVideoTransformer3DModel": PLAIN,
    "HunyuanVideo15Transformer3DModel": PLAIN,
    # One mask for all rows.
    "CosmosTransformer3DModel": {"forward": CallRules({"padding_mask": Batching.SHARED})},
    "SanaVideoTransformer3DModel": PLAIN,
    # Tables of positions, and an offset for all rows.
    "CogVideoXTransformer3DModel": {
        "forward": CallRules({"image_rotary_emb": Batching.SHARED, "ofs": Batching.SHARED})
    },
    "MochiTransformer3DModel": PLAIN,
    # Positions of a sequence. There is no mask of the text, so that only equal lengths go together.
    "Kandinsky5Transformer3DModel": {
        "forward": CallRules(
            {
                "visual_rope_pos": Batching.SHARED,
                "text_rope_pos": Batching.SHARED,
                "scale_factor": Batching.SHARED,
                "sparse_params": Batching.SHARED,
            }
        )
    },
}
