# SPDX-License-Identifier: Apache-2.0
"""Components that several families have in common."""

from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.tokenizers import VOCABULARY

QWEN_VOCABULARY = 416
"""At least the tokens that `tokenizers.qwen` has."""

HIDDEN = 32
"""Width of text encoders and of transformers, unless a family says otherwise."""


def clip_config(projection: int = HIDDEN, positions: int = 77) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        projection_dim=projection,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        hidden_act="gelu",
    )


def clip_text() -> CLIPTextModel:
    return CLIPTextModel(clip_config())


def clip_text_with_projection(
    projection: int = HIDDEN, positions: int = 77
) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config(projection, positions))


def t5_encoder(width: int = HIDDEN, vocabulary: int = VOCABULARY) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=8,
            d_ff=2 * width,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=32,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def autoencoder_kl(
    latent_channels: int = 4,
    *,
    blocks: int = 3,
    width: int = 16,
    quant_conv: bool = False,
    shift: float | None = 0.1,
    scale: float = 0.7,
    **more: object,
) -> AutoencoderKL:
    """A VAE whose latents are smaller than the image by `2 ** (blocks - 1)`.

    Norms are over groups of 4 channels: one that is constant by itself, as may happen, would be
    nothing but rounding.
    """
    return AutoencoderKL(
        sample_size=32,
        block_out_channels=(width,) * blocks,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=width // 4,
        use_quant_conv=quant_conv,
        use_post_quant_conv=quant_conv,
        shift_factor=shift,
        scaling_factor=scale,
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
        **more,
    )


def flow_match(**options: object) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**options)


def qwen3_config(layers: int = 2, **more: object) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=QWEN_VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **more,
    )


def qwen2_5_vl(layers: int = 2) -> Qwen2_5_VLForConditionalGeneration:
    """Its vision tower takes patches of 14 pixels and merges 2x2 of them."""
    ids = tokenizers.qwen().convert_tokens_to_ids
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": QWEN_VOCABULARY,
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [2, 3, 3],
                },
                "tie_word_embeddings": False,
            },
            vision_config={
                "depth": 2,
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
            tie_word_embeddings=False,
        )
    )


def qwen2_vl_processor() -> Qwen2VLProcessor:
    """At most 64 merged image tokens."""
    tokenizer = tokenizers.qwen()
    pixels = {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**pixels),
        chat_template=tokenizer.chat_template,
    )


def autoencoder_qwen(
    latents: int = 4, *, blocks: int = 3, channels: int = 3, width: int = 8
) -> AutoencoderKLQwenImage:
    """A VAE whose latents are smaller than the image by `2 ** (blocks - 1)`."""
    return AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=latents,
        dim_mult=[1] * blocks,
        num_res_blocks=1,
        temperal_downsample=[False] + [True] * (blocks - 2),
        input_channels=channels,
        latents_mean=[0.1 * (index % 3) for index in range(latents)],
        latents_std=[1.0 + 0.2 * (index % 3) for index in range(latents)],
    )


def autoencoder_flux2(latent_channels: int = 4, blocks: int = 3) -> AutoencoderKLFlux2:
    """A VAE whose latents are smaller than the image by `2 ** (blocks - 1)`, then packed 2x2."""
    return AutoencoderKLFlux2(
        sample_size=32,
        block_out_channels=(16,) * blocks,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        down_block_types=["DownEncoderBlock2D"] * blocks,
        up_block_types=["UpDecoderBlock2D"] * blocks,
    )
