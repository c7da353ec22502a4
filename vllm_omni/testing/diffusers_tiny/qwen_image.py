# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: text to image, edit with one and several images, layers."""

from diffusers import (
    QwenImageEditPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    autoencoder_qwen,
    flow_match,
    qwen2_5_vl,
    qwen2_vl_processor,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe
from vllm_omni.testing.diffusers_tiny.weights import steady_norms

EDIT_BLOCKS = 5
"""The edit pipelines scale input images to a megapixel; a VAE that makes them small again keeps the
number of tokens small."""


def qwen_image() -> QwenImagePipeline:
    return QwenImagePipeline(
        scheduler=_scheduler(),
        vae=autoencoder_qwen(),
        text_encoder=qwen2_5_vl(),
        tokenizer=tokenizers.qwen(),
        transformer=_transformer(),
    )


def qwen_image_edit() -> QwenImageEditPipeline:
    return QwenImageEditPipeline(
        scheduler=_scheduler(),
        vae=autoencoder_qwen(blocks=EDIT_BLOCKS, width=4),
        text_encoder=qwen2_5_vl(),
        tokenizer=tokenizers.qwen(),
        processor=qwen2_vl_processor(),
        transformer=_transformer(),
    )


def qwen_image_layered() -> QwenImageLayeredPipeline:
    """Not 4 latent channels: that many are taken for an image with transparency."""
    latents = 8
    return QwenImageLayeredPipeline(
        scheduler=_scheduler(),
        vae=autoencoder_qwen(latents, blocks=EDIT_BLOCKS, channels=4, width=4),
        text_encoder=qwen2_5_vl(),
        tokenizer=tokenizers.qwen(),
        processor=qwen2_vl_processor(),
        transformer=_transformer(latents, use_additional_t_cond=True, use_layer3d_rope=True),
    )


def steady(pipeline: QwenImageEditPipeline | QwenImageLayeredPipeline) -> None:
    """The VAE has few channels and many pixels."""
    steady_norms(pipeline.vae)


def steady_and_heard(pipeline: QwenImageEditPipeline) -> None:
    """Beside the tokens of an input picture, those of a prompt are few."""
    steady(pipeline)
    for block in pipeline.transformer.transformer_blocks:
        block.attn.norm_added_k.weight.mul_(6)
        block.attn.add_v_proj.weight.mul_(6)


def _scheduler() -> object:
    return flow_match(use_dynamic_shifting=True)


def _transformer(latents: int = 4, **more: object) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * latents,
        out_channels=latents,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=HIDDEN,
        axes_dims_rope=(4, 6, 6),
        **more,
    )


GUIDANCE = "true_cfg_scale"
PARTIAL = {"strength": 0.5}
RECIPES = {
    "qwen_image": Recipe(
        qwen_image,
        (
            Example("QwenImagePipeline", guidance=GUIDANCE),
            Example("QwenImageImg2ImgPipeline", guidance=GUIDANCE, image="image", fixed=PARTIAL),
            Example(
                "QwenImageInpaintPipeline",
                guidance=GUIDANCE,
                image="image",
                mask="mask_image",
                fixed=PARTIAL,
            ),
        ),
    ),
    "qwen_image_edit": Recipe(
        qwen_image_edit,
        (
            Example("QwenImageEditPipeline", guidance=GUIDANCE, image="image", heavy=True),
            Example(
                "QwenImageEditPlusPipeline",
                guidance=GUIDANCE,
                image="image",
                images=2,
                heavy=True,
            ),
        ),
        tune=steady_and_heard,
    ),
    "qwen_image_layered": Recipe(
        qwen_image_layered,
        (
            Example(
                "QwenImageLayeredPipeline",
                guidance=GUIDANCE,
                sized=False,
                image="image",
                image_mode="RGBA",
                heavy=True,
                fixed={"layers": 2, "resolution": 640},
            ),
        ),
        tune=steady,
    ),
}
