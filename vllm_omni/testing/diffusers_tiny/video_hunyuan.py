# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo and HunyuanVideo 1.5."""

from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from transformers import (
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.media import VideoExample, first_frame
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    QWEN_VOCABULARY,
    clip_text,
    flow_match,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Recipe
from vllm_omni.testing.diffusers_tiny.video_parts import hunyuan_video_vae

BYTE_ROWS = 384
GLYPH_WIDTH = 16
LATENTS_15 = 8
SIGLIP_SIZE, SIGLIP_PATCH = 54, 2
"""27 x 27 patches: the 729 image tokens that the pipelines count on."""


def hunyuan_video() -> HunyuanVideoPipeline:
    latents = 4
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(
            LlamaConfig(
                vocab_size=QWEN_VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=1024,
                pad_token_id=0,
            )
        ),
        tokenizer=tokenizers.byte_level(
            ("<pad>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            pad_token="<pad>",
            padding_side="right",
        ),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=latents,
            out_channels=latents,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            text_embed_dim=HIDDEN,
            pooled_projection_dim=HIDDEN,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=hunyuan_video_vae(latents),
        scheduler=flow_match(shift=7.0),
        text_encoder_2=clip_text(),
        tokenizer_2=tokenizers.clip(),
    )


def parts_15(task: str) -> dict[str, Any]:
    return {
        "text_encoder": Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=QWEN_VOCABULARY,
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=2048,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1_000_000.0,
                    "mrope_section": [2, 3, 3],
                },
            )
        ),
        "tokenizer": tokenizers.qwen(),
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=2 * LATENTS_15 + 1,
            out_channels=LATENTS_15,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            text_embed_dim=HIDDEN,
            text_embed_2_dim=GLYPH_WIDTH,
            image_embed_dim=HIDDEN,
            rope_axes_dim=(4, 6, 6),
            target_size=32,
            task_type=task,
        ),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=LATENTS_15,
            block_out_channels=(16, 16, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
        ),
        "scheduler": flow_match(shift=7.0),
        "text_encoder_2": t5_encoder(GLYPH_WIDTH, BYTE_ROWS),
        "tokenizer_2": tokenizers.byt5(),
        "guider": ClassifierFreeGuidance(guidance_scale=3.0),
    }


def hunyuan_video_15() -> HunyuanVideo15Pipeline:
    return HunyuanVideo15Pipeline(**parts_15("t2v"))


def hunyuan_video_15_i2v() -> HunyuanVideo15ImageToVideoPipeline:
    return HunyuanVideo15ImageToVideoPipeline(
        **parts_15("i2v"),
        image_encoder=SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=HIDDEN,
                intermediate_size=2 * HIDDEN,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=SIGLIP_SIZE,
                patch_size=SIGLIP_PATCH,
            )
        ),
        feature_extractor=SiglipImageProcessor(size={"height": SIGLIP_SIZE, "width": SIGLIP_SIZE}),
    )


RECIPES = {
    "hunyuan_video": Recipe(
        hunyuan_video,
        (VideoExample("HunyuanVideoPipeline", fixed={"true_cfg_scale": 1.0}),),
    ),
    "hunyuan_video_15": Recipe(
        hunyuan_video_15,
        (VideoExample("HunyuanVideo15Pipeline", guidance=None, heavy=True),),
    ),
    "hunyuan_video_15_i2v": Recipe(
        hunyuan_video_15_i2v,
        (
            VideoExample(
                "HunyuanVideo15ImageToVideoPipeline",
                guidance=None,
                heavy=True,
                sized=False,
                inputs={"image": first_frame},
            ),
        ),
    ),
}
