# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 1.5, XL and 3."""

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    autoencoder_kl,
    clip_text,
    clip_text_with_projection,
    flow_match,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}


def sd15() -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=autoencoder_kl(quant_conv=True, shift=None),
        text_encoder=clip_text(),
        tokenizer=tokenizers.clip(),
        unet=UNet2DConditionModel(**UNET, cross_attention_dim=HIDDEN, attention_head_dim=4),
        scheduler=DDIMScheduler(**NOISE, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> StableDiffusionXLPipeline:
    pooled, size_ids, id_width = HIDDEN, 6, 8
    return StableDiffusionXLPipeline(
        vae=autoencoder_kl(quant_conv=True, shift=None),
        text_encoder=clip_text(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=clip_text_with_projection(pooled),
        tokenizer_2=tokenizers.clip(),
        unet=UNet2DConditionModel(
            **UNET,
            cross_attention_dim=2 * HIDDEN,
            attention_head_dim=(2, 4),
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=id_width,
            projection_class_embeddings_input_dim=pooled + size_ids * id_width,
        ),
        scheduler=EulerDiscreteScheduler(**NOISE, steps_offset=1, timestep_spacing="leading"),
    )


def sd3() -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=2 * HIDDEN,
            pooled_projection_dim=2 * HIDDEN,
            pos_embed_max_size=32,
        ),
        scheduler=flow_match(shift=3.0),
        vae=autoencoder_kl(16),
        text_encoder=clip_text_with_projection(),
        tokenizer=tokenizers.clip(),
        text_encoder_2=clip_text_with_projection(),
        tokenizer_2=tokenizers.clip(),
        text_encoder_3=t5_encoder(2 * HIDDEN),
        tokenizer_3=tokenizers.t5(),
    )


PARTIAL = {"strength": 0.5}
FULL = {"strength": 1.0}
RECIPES = {
    "sd15": Recipe(
        sd15,
        (
            Example("StableDiffusionPipeline"),
            Example("StableDiffusionImg2ImgPipeline", image="image", sized=False, fixed=FULL),
            Example("StableDiffusionInpaintPipeline", image="image", mask="mask_image", fixed=FULL),
        ),
    ),
    "sdxl": Recipe(
        sdxl,
        (
            Example("StableDiffusionXLPipeline"),
            Example("StableDiffusionXLImg2ImgPipeline", image="image", sized=False, fixed=FULL),
            Example(
                "StableDiffusionXLInpaintPipeline", image="image", mask="mask_image", fixed=FULL
            ),
        ),
    ),
    "sd3": Recipe(
        sd3,
        (
            Example("StableDiffusion3Pipeline", fixed={"max_sequence_length": 32}),
            Example("StableDiffusion3Img2ImgPipeline", image="image", fixed=PARTIAL),
            Example(
                "StableDiffusion3InpaintPipeline", image="image", mask="mask_image", fixed=PARTIAL
            ),
        ),
    ),
}
