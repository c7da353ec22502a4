# SPDX-License-Identifier: Apache-2.0
"""Denoisers of pictures."""

from collections.abc import Hashable, Mapping
from typing import Any

from vllm_omni.diffusion.programs.diffusers.rules.common import DETERMINISTIC_VAE
from vllm_omni.diffusion.rules import Along, Batching, CallRules, Equal, Mask, Ragged

PLAIN = CallRules()
"""Every tensor has the batch in front, and prompts are padded to one length."""


def _packed_tokens(arguments: Mapping[str, Any]) -> int:
    """[rows, tokens, channels]"""
    return arguments["hidden_states"].shape[1]


def _latent_pixels(arguments: Mapping[str, Any]) -> int:
    """[rows, channels, height, width]"""
    return arguments["hidden_states"].shape[2:].numel()


def _key_of_cache(caches: Any) -> Hashable:
    """GLM-Image keeps input pictures in a cache, and passes one along without any, too."""
    return None if caches is None or caches[0].mode in (None, "skip") else id(caches)


RULES = {
    # Stable Diffusion: the timestep is one number for all rows.
    "UNet2DConditionModel": {"forward": CallRules({"timestep": Batching.STACK})},
    "SD3Transformer2DModel": {"forward": PLAIN},
    # Prompts are as long as they are.
    "QwenImageTransformer2DModel": {
        "forward": CallRules(
            {
                "encoder_hidden_states": Ragged(dim=1),
                "encoder_hidden_states_mask": Mask(),
                "img_shapes": Batching.PER_ROW,
            },
            beside=_packed_tokens,
        )
    },
    # The model pads prompts itself. It would pad pictures too, at the price of the largest.
    "ZImageTransformer2DModel": {
        "forward": CallRules({"x": Batching.ALIKE, "cap_feats": Batching.LIST})
    },
    "ErnieImageTransformer2DModel": {
        "forward": CallRules({"text_bth": Ragged(dim=1)}, beside=_latent_pixels)
    },
    # [layers, rows, tokens, width]
    "HiDreamImageTransformer2DModel": {
        "forward": CallRules({"encoder_hidden_states_llama3": Along(dim=1)})
    },
    "Krea2Transformer2DModel": {"forward": CallRules({"position_ids": Batching.SHARED})},
    "HunyuanDiT2DModel": {"forward": CallRules({"image_rotary_emb": Batching.SHARED})},
    "HunyuanImageTransformer2DModel": {"forward": PLAIN},
    # Their masks of padding are added to the scores as numbers, which masks nothing: only prompts
    # of equal length run together.
    "CogView4Transformer2DModel": {"forward": PLAIN},
    "GlmImageTransformer2DModel": {"forward": CallRules({"kv_caches": Equal(_key_of_cache)})},
    "Lumina2Transformer2DModel": {"forward": PLAIN},
    "SanaTransformer2DModel": {"forward": PLAIN},
    "PixArtTransformer2DModel": {"forward": PLAIN},
    "AuraFlowTransformer2DModel": {"forward": PLAIN},
    "AutoencoderKL": DETERMINISTIC_VAE,
    "AutoencoderKLFlux2": DETERMINISTIC_VAE,
}
