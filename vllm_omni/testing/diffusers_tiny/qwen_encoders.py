# SPDX-License-Identifier: Apache-2.0
"""Families with a Qwen as text encoder: Z-Image, Ovis, LongCat-Image, Krea 2, HunyuanImage."""

from diffusers import (
    AutoencoderKLHunyuanImage,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from transformers import Qwen3Model, Qwen3VLConfig, Qwen3VLModel

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    QWEN_VOCABULARY,
    autoencoder_kl,
    autoencoder_qwen,
    flow_match,
    qwen2_5_vl,
    qwen2_vl_processor,
    qwen3_config,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

LATENTS = 4
PACKED = 4 * LATENTS


def z_image() -> ZImagePipeline:
    return ZImagePipeline(
        scheduler=flow_match(use_dynamic_shifting=False, shift=3.0),
        vae=autoencoder_kl(LATENTS),
        text_encoder=Qwen3Model(qwen3_config()),
        tokenizer=tokenizers.qwen(),
        transformer=ZImageTransformer2DModel(
            all_patch_size=(2,),
            all_f_patch_size=(1,),
            in_channels=LATENTS,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=HIDDEN,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        ),
    )


def ovis_image() -> OvisImagePipeline:
    return OvisImagePipeline(
        scheduler=flow_match(use_dynamic_shifting=True, shift=3.0),
        vae=autoencoder_kl(LATENTS),
        text_encoder=Qwen3Model(qwen3_config()),
        tokenizer=tokenizers.qwen(),
        transformer=OvisImageTransformer2DModel(
            patch_size=1,
            in_channels=PACKED,
            out_channels=PACKED,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def longcat_image() -> LongCatImagePipeline:
    """The edit pipeline scales input images to a megapixel, and the VAE makes them small again.

    16 latent channels are written into the pipelines.
    """
    latents = 16
    return LongCatImagePipeline(
        scheduler=flow_match(use_dynamic_shifting=True, shift=3.0),
        vae=autoencoder_kl(latents, blocks=5, width=4),
        text_encoder=qwen2_5_vl(),
        tokenizer=tokenizers.qwen(),
        text_processor=qwen2_vl_processor(),
        transformer=LongCatImageTransformer2DModel(
            patch_size=1,
            in_channels=4 * latents,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            pooled_projection_dim=HIDDEN,
            axes_dims_rope=[4, 6, 6],
        ),
    )


def krea2() -> Krea2Pipeline:
    return Krea2Pipeline(
        scheduler=flow_match(use_dynamic_shifting=True),
        vae=autoencoder_qwen(),
        text_encoder=Qwen3VLModel(qwen3_vl_config()),
        tokenizer=tokenizers.qwen(),
        transformer=Krea2Transformer2DModel(
            in_channels=PACKED,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            timestep_embed_dim=32,
            text_hidden_dim=HIDDEN,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=64,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        text_encoder_select_layers=(1, 2),
    )


def qwen3_vl_config() -> Qwen3VLConfig:
    ids = tokenizers.qwen().convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": QWEN_VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def hunyuan_image() -> HunyuanImagePipeline:
    latents, byt5_vocabulary = 8, 384
    return HunyuanImagePipeline(
        scheduler=flow_match(shift=5.0),
        vae=AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=latents,
            block_out_channels=(32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=4,
            sample_size=32,
            scaling_factor=0.75,
        ),
        text_encoder=qwen2_5_vl(layers=3),
        tokenizer=tokenizers.qwen(),
        text_encoder_2=t5_encoder(vocabulary=byt5_vocabulary),
        tokenizer_2=tokenizers.byt5(),
        transformer=HunyuanImageTransformer2DModel(
            in_channels=latents,
            out_channels=latents,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=(1, 1),
            text_embed_dim=HIDDEN,
            text_embed_2_dim=HIDDEN,
            rope_axes_dim=(8, 8),
        ),
        guider=AdaptiveProjectedMixGuidance(),
        ocr_guider=AdaptiveProjectedMixGuidance(),
    )


RECIPES = {
    "z_image": Recipe(
        z_image,
        (
            Example("ZImagePipeline"),
            Example("ZImageImg2ImgPipeline", image="image", fixed={"strength": 0.5}),
            Example(
                "ZImageInpaintPipeline",
                image="image",
                mask="mask_image",
                fixed={"strength": 0.5},
            ),
        ),
    ),
    "ovis_image": Recipe(ovis_image, (Example("OvisImagePipeline"),)),
    "longcat_image": Recipe(
        longcat_image,
        (
            Example("LongCatImagePipeline", fixed={"enable_prompt_rewrite": False}),
            Example("LongCatImageEditPipeline", sized=False, image="image", heavy=True),
        ),
    ),
    "krea2": Recipe(krea2, (Example("Krea2Pipeline"),)),
    "hunyuan_image": Recipe(
        hunyuan_image, (Example("HunyuanImagePipeline", guidance=None, heavy=True),)
    ),
}
