# SPDX-License-Identifier: Apache-2.0
"""Families with T5 among their text encoders: PixArt-Sigma, AuraFlow, HiDream, Hunyuan-DiT."""

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    UMT5Config,
    UMT5EncoderModel,
)

from vllm_omni.testing.diffusers_tiny import tokenizers
from vllm_omni.testing.diffusers_tiny.parts import (
    HIDDEN,
    autoencoder_kl,
    clip_text_with_projection,
    flow_match,
    t5_encoder,
)
from vllm_omni.testing.diffusers_tiny.recipe import Example, Recipe

LATENTS = 4
LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")
HIDREAM_TEXT = 128
"""Tokens to which HiDream pads all its prompts, CLIP's too."""


def pixart_sigma() -> PixArtSigmaPipeline:
    return PixArtSigmaPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=t5_encoder(),
        vae=autoencoder_kl(LATENTS, shift=None),
        transformer=PixArtTransformer2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=HIDDEN,
            in_channels=LATENTS,
            cross_attention_dim=32,
            out_channels=2 * LATENTS,
            use_additional_conditions=False,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )


def auraflow() -> AuraFlowPipeline:
    return AuraFlowPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                vocab_size=tokenizers.VOCABULARY,
                d_model=HIDDEN,
                d_kv=8,
                d_ff=2 * HIDDEN,
                num_layers=2,
                num_heads=4,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=32,
            )
        ),
        vae=autoencoder_kl(LATENTS, shift=None),
        transformer=AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=LATENTS,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=HIDDEN,
            caption_projection_dim=32,
            out_channels=LATENTS,
            pos_embed_max_size=256,
        ),
        scheduler=flow_match(shift=1.73),
    )


def hidream() -> HiDreamImagePipeline:
    """The pipeline scales what is asked for to 128 x 128 latents, so these are pixels here."""
    llama = LlamaConfig(
        vocab_size=tokenizers.VOCABULARY + len(LLAMA_TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    return HiDreamImagePipeline(
        scheduler=flow_match(shift=3.0),
        vae=autoencoder_kl(LATENTS, blocks=1),
        text_encoder=clip_text_with_projection(positions=HIDREAM_TEXT),
        tokenizer=tokenizers.clip(HIDREAM_TEXT),
        text_encoder_2=clip_text_with_projection(positions=HIDREAM_TEXT),
        tokenizer_2=tokenizers.clip(HIDREAM_TEXT),
        text_encoder_3=t5_encoder(),
        tokenizer_3=tokenizers.t5(),
        text_encoder_4=LlamaForCausalLM(llama),
        tokenizer_4=tokenizers.byte_level(
            LLAMA_TOKENS, bos_token=LLAMA_TOKENS[0], eos_token=LLAMA_TOKENS[1]
        ),
        transformer=HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=LATENTS,
            out_channels=LATENTS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[HIDDEN, HIDDEN],
            text_emb_dim=2 * HIDDEN,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 6, 6),
            max_resolution=(128, 128),
            llama_layers=[0, 1],
        ),
    )


def hunyuan_dit() -> HunyuanDiTPipeline:
    """The pipeline takes its VAE's factor to be 8."""
    bert = BertConfig(
        vocab_size=tokenizers.VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * HIDDEN,
        max_position_embeddings=77,
    )
    return HunyuanDiTPipeline(
        vae=autoencoder_kl(LATENTS, blocks=4, shift=None),
        text_encoder=BertModel(bert),
        tokenizer=tokenizers.bert(),
        transformer=HunyuanDiT2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=16,
            num_attention_heads=2,
            hidden_size=32,
            mlp_ratio=2.0,
            in_channels=LATENTS,
            cross_attention_dim=HIDDEN,
            cross_attention_dim_t5=HIDDEN,
            pooled_projection_dim=16,
            activation_fn="gelu-approximate",
        ),
        scheduler=DDPMScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.02,
            prediction_type="v_prediction",
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=t5_encoder(),
        tokenizer_2=tokenizers.t5(256),
    )


AS_ASKED = {"use_resolution_binning": False}
RECIPES = {
    "pixart_sigma": Recipe(
        pixart_sigma,
        (
            Example(
                "PixArtSigmaPipeline",
                fixed=AS_ASKED | {"max_sequence_length": 64, "clean_caption": False},
            ),
        ),
    ),
    "auraflow": Recipe(auraflow, (Example("AuraFlowPipeline", fixed={"max_sequence_length": 64}),)),
    "hidream": Recipe(hidream, (Example("HiDreamImagePipeline", heavy=True),)),
    "hunyuan_dit": Recipe(hunyuan_dit, (Example("HunyuanDiTPipeline", fixed=AS_ASKED),)),
}
