# SPDX-License-Identifier: Apache-2.0
"""Sizes of the MiniCPM4 transformers that VoxCPM2 consists of."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MiniCPMShape:
    """Sizes of one of the transformers.

    Attributes:
        width: Of the hidden states.
        inner: Of the feed-forward networks.
        heads: Of queries.
        kv_heads: Of keys and values.
        head_dim: Width of a head.
        layers: How many.
        eps: Of the norms.
        residual_scale: Of what a layer adds.
        rope: Parameters as vLLM takes them; None for no positions.
        max_position: The first position that there is not.
    """

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float
    residual_scale: float
    rope: dict[str, Any] | None
    max_position: int

    @classmethod
    def of(cls, lm: dict[str, Any], layers: int, *, no_rope: bool, **others: Any) -> "MiniCPMShape":
        """Of a language model's config, with other sizes where these are given (`width`, `inner`,
        `heads`, `head_dim`)."""
        width = others.get("width", lm["hidden_size"])
        heads = others.get("heads", lm["num_attention_heads"])
        return cls(
            width=width,
            inner=others.get("inner", lm["intermediate_size"]),
            heads=heads,
            kv_heads=lm["num_key_value_heads"],
            head_dim=others.get("head_dim", lm["kv_channels"]) or width // heads,
            layers=layers,
            eps=lm["rms_norm_eps"],
            residual_scale=lm["scale_depth"] / math.sqrt(layers) if lm["use_mup"] else 1.0,
            rope=None if no_rope else _rope(lm),
            max_position=lm["max_position_embeddings"],
        )


def _rope(lm: dict[str, Any]) -> dict[str, Any]:
    """The one set of factors that counts, whatever the length."""
    scaling = lm["rope_scaling"]
    original = scaling["original_max_position_embeddings"]
    is_long = lm["max_position_embeddings"] > original
    factors = scaling["long_factor"] if is_long else scaling["short_factor"]
    return {
        "rope_type": "longrope",
        "rope_theta": lm["rope_theta"],
        "long_factor": factors,
        "short_factor": factors,
        "original_max_position_embeddings": original,
    }
