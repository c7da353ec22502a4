# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a VoxCPM2 checkpoint (`model_type: voxcpm2`).

Fields, defaults and their meaning are those of the authors' package, `voxcpm` 2.0.3. Rotary
settings are long RoPE's, in `lm_config.rope_scaling`.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

LM_DEFAULTS: dict[str, Any] = {"use_mup": True, "kv_channels": None, "no_rope": False}
LOCAL_DEFAULTS: dict[str, Any] = {
    "hidden_dim": 1024,
    "ffn_dim": 4096,
    "num_heads": 16,
    "num_layers": 4,
    "kv_channels": None,
}
CODEC_DEFAULTS: dict[str, Any] = {
    "encoder_dim": 128,
    "encoder_rates": [2, 5, 8, 8],
    "latent_dim": 64,
    "decoder_dim": 2048,
    "decoder_rates": [8, 6, 5, 2, 2, 2],
    "depthwise": True,
    "sample_rate": 16000,
    "out_sample_rate": 48000,
    "use_noise_block": False,
    "sr_bin_boundaries": [20000, 30000, 40000],
    "cond_type": "scale_bias",
    "cond_out_layer": False,
}


@strict
class VoxCPM2Config(PreTrainedConfig):
    """See the module.

    Attributes:
        lm_config: Of the text and semantics language model, a MiniCPM4; the other transformers take
            from it what is not said of them.
        patch_size: Latents of the codec per frame.
        feat_dim: Numbers of a latent.
        residual_lm_num_layers: Of the second language model, which goes on from the first's.
        residual_lm_no_rope: It has no positions.
        scalar_quantization_latent_dim: Numbers between the two that are rounded.
        scalar_quantization_scale: To multiples of 1 / this.
        encoder_config: Of the transformer that makes an embedding of a frame.
        dit_config: Of the transformer that draws a frame.
        audio_vae_config: Of the codec.
    """

    model_type = "voxcpm2"

    lm_config: dict | None = None
    patch_size: int = 4
    feat_dim: int = 64
    residual_lm_num_layers: int = 8
    residual_lm_no_rope: bool = False
    scalar_quantization_latent_dim: int = 512
    scalar_quantization_scale: int = 9
    encoder_config: dict | None = None
    dit_config: dict | None = None
    audio_vae_config: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.lm_config = {**LM_DEFAULTS, **(self.lm_config or {})}
        self.encoder_config = {**LOCAL_DEFAULTS, **(self.encoder_config or {})}
        self.dit_config = {**LOCAL_DEFAULTS, "dit_mean_mode": False, **(self.dit_config or {})}
        self.audio_vae_config = {**CODEC_DEFAULTS, **(self.audio_vae_config or {})}
        super().__post_init__(**kwargs)
