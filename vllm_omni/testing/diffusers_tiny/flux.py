# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 (with Kontext and Fill), FLUX.2 (with Klein) and Chroma."""

from diffusers import (
    ChromaPipeline,
    ChromaTransformer2DModel,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxFillPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen3ForCausalLM,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    autoencoder_flux2,
    autoencoder_kl,
    clip_text,
    flow_match,
    qwen3_config,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

LATENTS = 4
PACKED = 4 * LATENTS
DYNAMIC_SHIFT = {"use_dynamic_shifting": True, "shift": 3.0}

MISTRAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]")
MISTRAL_TOKENS += ("[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
MISTRAL_TEMPLATE = """\
<s>{%- for message in messages -%}
{%- if message.role == 'system' %}[SYSTEM_PROMPT]{% else %}[INST]{% endif -%}
{%- if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' %}[IMG]{% else %}{{ part.text }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'system' %}[/SYSTEM_PROMPT]{% else %}[/INST]{% endif -%}
{%- endfor -%}
"""


def flux() -> FluxPipeline:
    return FluxPipeline(**_flux_parts(PACKED, guidance=True))


def flux_fill() -> FluxFillPipeline:
    """The transformer sees the masked image and, per latent pixel, the mask's 8x8 pixels."""
    parts = _flux_parts(2 * PACKED + 4 * 4 * 4, guidance=True)
    return FluxFillPipeline(**parts)


def _flux_parts(in_channels: int, guidance: bool) -> dict[str, object]:
    return {
        "scheduler": flow_match(**DYNAMIC_SHIFT),
        "vae": autoencoder_kl(LATENTS),
        "text_encoder": clip_text(),
        "tokenizer": tokenizers.clip(),
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": tokenizers.t5(),
        "transformer": FluxTransformer2DModel(
            patch_size=1,
            in_channels=in_channels,
            out_channels=PACKED,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            pooled_projection_dim=HIDDEN,
            axes_dims_rope=(4, 6, 6),
            guidance_embeds=guidance,
        ),
    }


def flux2() -> Flux2Pipeline:
    """The text encoder has so many layers because the pipeline taps the 30th."""
    return Flux2Pipeline(
        scheduler=flow_match(**DYNAMIC_SHIFT),
        vae=autoencoder_flux2(LATENTS),
        text_encoder=Mistral3ForConditionalGeneration(mistral3_config(layers=31)),
        tokenizer=pixtral_processor(),
        transformer=_flux2_transformer(guidance=True),
    )


def flux2_klein() -> Flux2KleinPipeline:
    """The text encoder has so many layers because the pipeline taps the 27th."""
    return Flux2KleinPipeline(
        scheduler=flow_match(**DYNAMIC_SHIFT),
        vae=autoencoder_flux2(LATENTS),
        text_encoder=Qwen3ForCausalLM(qwen3_config(layers=28)),
        tokenizer=tokenizers.qwen(),
        transformer=_flux2_transformer(guidance=False),
    )


def hear_flux2(pipeline: Flux2Pipeline) -> None:
    """Words outweigh what so many layers make of the same long system prompt."""
    pipeline.text_encoder.get_input_embeddings().weight.mul_(8)


def _flux2_transformer(guidance: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=PACKED,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * HIDDEN,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def mistral3_config(layers: int) -> Mistral3Config:
    return Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": tokenizers.VOCABULARY + len(MISTRAL_TOKENS),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_index=MISTRAL_TOKENS.index("[IMG]"),
        spatial_merge_size=1,
        tie_word_embeddings=False,
    )


def pixtral_processor() -> PixtralProcessor:
    tokenizer = tokenizers.byte_level(
        MISTRAL_TOKENS,
        chat_template=MISTRAL_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    size = {"longest_edge": 56}
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(size=size, patch_size={"height": 14, "width": 14}),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=1,
        chat_template=MISTRAL_TEMPLATE,
    )


def chroma() -> ChromaPipeline:
    return ChromaPipeline(
        scheduler=flow_match(**DYNAMIC_SHIFT),
        vae=autoencoder_kl(LATENTS),
        text_encoder=t5_encoder(),
        tokenizer=tokenizers.t5(),
        transformer=ChromaTransformer2DModel(
            patch_size=1,
            in_channels=PACKED,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=64,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    )


TEXT = {"max_sequence_length": 48}
PARTIAL = TEXT | {"strength": 0.5}
RECIPES = {
    "flux": Recipe(
        flux,
        (
            Example("FluxPipeline", negative=False, fixed=TEXT),
            Example("FluxImg2ImgPipeline", negative=False, image="image", fixed=PARTIAL),
            Example(
                "FluxInpaintPipeline",
                negative=False,
                image="image",
                mask="mask_image",
                fixed=PARTIAL,
            ),
            Example(
                "FluxKontextPipeline",
                negative=False,
                image="image",
                fixed=TEXT | {"max_area": 64 * 64, "_auto_resize": False},
            ),
        ),
    ),
    "flux_fill": Recipe(
        flux_fill,
        (
            Example(
                "FluxFillPipeline", negative=False, image="image", mask="mask_image", fixed=TEXT
            ),
        ),
    ),
    "flux2": Recipe(
        flux2,
        (Example("Flux2Pipeline", negative=False, fixed={"max_sequence_length": 224}),),
        tune=hear_flux2,
    ),
    "flux2_klein": Recipe(
        flux2_klein,
        (Example("Flux2KleinPipeline", negative=False, fixed={"max_sequence_length": 128}),),
    ),
    "chroma": Recipe(chroma, (Example("ChromaPipeline", fixed=TEXT),)),
}
