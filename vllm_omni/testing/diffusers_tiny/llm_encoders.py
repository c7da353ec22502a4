# SPDX-License-Identifier: Apache-2.0
"""Families with a language model as text encoder: Sana, Lumina 2, CogView 4, ERNIE-Image and
GLM-Image, whose language model writes image tokens first."""

from diffusers import (
    AutoencoderDC,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    DPMSolverMultistepScheduler,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import (
    Gemma2Config,
    Gemma2Model,
    GlmConfig,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    GlmModel,
    Mistral3Model,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.flux import MISTRAL_TOKENS, mistral3_config
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    autoencoder_flux2,
    autoencoder_kl,
    flow_match,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

LATENTS = 4
GLM_TOKENS = ("<|endoftext|>", "<sop>", "[gMASK]")


def sana() -> SanaPipeline:
    return SanaPipeline(
        tokenizer=tokenizers.gemma(),
        text_encoder=gemma2(),
        vae=AutoencoderDC(
            in_channels=3,
            latent_channels=LATENTS,
            attention_head_dim=4,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            scaling_factor=0.41,
        ),
        transformer=SanaTransformer2DModel(
            patch_size=1,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=HIDDEN,
            sample_size=32,
        ),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def gemma2() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=tokenizers.VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
        )
    )


def lumina2() -> Lumina2Pipeline:
    """The pipeline takes its VAE's factor to be 8."""
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=LATENTS,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            cap_feat_dim=HIDDEN,
        ),
        scheduler=flow_match(shift=6.0),
        vae=autoencoder_kl(LATENTS, blocks=4),
        text_encoder=gemma2(),
        tokenizer=tokenizers.gemma(),
    )


def cogview4() -> CogView4Pipeline:
    glm = GlmConfig(
        vocab_size=tokenizers.VOCABULARY + len(GLM_TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=0,
    )
    return CogView4Pipeline(
        tokenizer=tokenizers.byte_level(
            GLM_TOKENS, pad_token="<|endoftext|>", eos_token="<|endoftext|>"
        ),
        text_encoder=GlmModel(glm),
        vae=autoencoder_kl(LATENTS),
        transformer=CogView4Transformer2DModel(
            patch_size=2,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=HIDDEN,
            time_embed_dim=16,
            condition_dim=8,
            pos_embed_max_size=32,
            sample_size=16,
            rope_axes_dim=(16, 16),
        ),
        scheduler=flow_match(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    )


def ernie_image() -> ErnieImagePipeline:
    """Without the model that rewrites prompts."""
    return ErnieImagePipeline(
        transformer=ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            in_channels=4 * LATENTS,
            out_channels=4 * LATENTS,
            patch_size=1,
            text_in_dim=HIDDEN,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=autoencoder_flux2(LATENTS),
        text_encoder=Mistral3Model(mistral3_config(layers=2)),
        tokenizer=tokenizers.byte_level(
            MISTRAL_TOKENS, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
        ),
        scheduler=flow_match(shift=3.0),
    )


GLM_IMAGE_TOKENS = 64
"""Image tokens: the first ids of the vocabulary, the only ones that are generated."""

GLM_IMAGE_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}<|boi|><|image|><|eoi|>{% else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endfor -%}
"""


def glm_image() -> GlmImagePipeline:
    tokenizer = _glm_image_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    byt5_vocabulary = 384
    language_model = GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "vision_vocab_size": GLM_IMAGE_TOKENS,
                "hidden_size": HIDDEN,
                "intermediate_size": 2 * HIDDEN,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 4096,
                "pad_token_id": ids("<|endoftext|>"),
                "eos_token_id": ids("<|eoi|>"),
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                },
            },
            vision_config={
                "depth": 1,
                "hidden_size": HIDDEN,
                "num_heads": 2,
                "intermediate_size": 2 * HIDDEN,
                "image_size": 64,
                "patch_size": 16,
            },
            vq_config={
                "embed_dim": 16,
                "num_embeddings": GLM_IMAGE_TOKENS,
                "latent_channels": HIDDEN,
            },
            image_token_id=ids("<|image|>"),
            image_start_token_id=ids("<|boi|>"),
            image_end_token_id=ids("<|eoi|>"),
        )
    )
    return GlmImagePipeline(
        tokenizer=tokenizers.byt5(),
        processor=GlmImageProcessor(
            image_processor=GlmImageImageProcessor(patch_size=16, merge_size=1),
            tokenizer=tokenizer,
            chat_template=GLM_IMAGE_TEMPLATE,
        ),
        text_encoder=t5_encoder(vocabulary=byt5_vocabulary),
        vision_language_encoder=language_model,
        vae=autoencoder_kl(
            LATENTS,
            blocks=4,
            shift=None,
            latents_mean=[0.1, -0.1, 0.0, 0.2],
            latents_std=[1.0, 1.2, 0.9, 1.1],
        ),
        transformer=GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=HIDDEN,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=GLM_IMAGE_TOKENS,
        ),
        scheduler=flow_match(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
        ),
    )


def _glm_image_tokenizer() -> object:
    """Image tokens first, then the named ones."""
    images = tuple(f"<image_{index}>" for index in range(GLM_IMAGE_TOKENS))
    named = ("<|endoftext|>", "<|image|>", "<|boi|>", "<|eoi|>", "<sop>", "<eop>")
    return tokenizers.byte_level(
        images + named,
        bos_token="<|boi|>",
        eos_token="<|eoi|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image|>",
            "grid_bos_token": "<sop>",
            "grid_eos_token": "<eop>",
        },
    )


RECIPES = {
    "sana": Recipe(
        sana,
        (
            Example(
                "SanaPipeline",
                fixed={
                    "use_resolution_binning": False,
                    "complex_human_instruction": None,
                    "max_sequence_length": 64,
                },
            ),
        ),
    ),
    "lumina2": Recipe(lumina2, (Example("Lumina2Pipeline"),)),
    "cogview4": Recipe(cogview4, (Example("CogView4Pipeline"),)),
    "ernie_image": Recipe(ernie_image, (Example("ErnieImagePipeline"),)),
    "glm_image": Recipe(glm_image, (Example("GlmImagePipeline", negative=False, heavy=True),)),
}
